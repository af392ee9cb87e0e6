"""Records what a command prints in a terminal, and draws it: the last screen, or all as a film.

A terminal of its own, so that the command shows its live table. Understood is what rich writes:
colors, and moving the cursor within the lines that it redraws.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import pty
import re
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib import font_manager
from PIL import Image, ImageColor, ImageDraw, ImageFont

INK, PAPER = "#d7dae0", "#1e2127"
COLORS = ["#5c6370", "#e06c75", "#98c379", "#e5c07b", "#61afef", "#c678dd", "#56b6c2", "#abb2bf"]
SEQUENCE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|\x1b\][^\x07]*\x07|\x1b.")
SIZE = 15

Screen = list[list[tuple[str, str, bool]]]  # lines of (character, color, bold)


@dataclass
class Terminal:
    """A screen of text with a cursor."""

    columns: int
    rows: int
    lines: Screen = field(default_factory=lambda: [[]])
    row: int = 0
    column: int = 0
    color: str = INK
    bold: bool = False

    def write(self, text: str) -> None:
        """Show text with its control sequences."""
        at = 0
        for sequence in SEQUENCE.finditer(text):
            self._plain(text[at : sequence.start()])
            self._control(sequence[1] or "", sequence[2] or "")
            at = sequence.end()
        self._plain(text[at:])

    def _plain(self, text: str) -> None:
        for character in text:
            if character == "\r":
                self.column = 0
            elif character == "\n":
                self.row, self.column = self.row + 1, 0
            elif character >= " ":
                self._put(character)
            while self.row >= len(self.lines):
                self.lines.append([])

    def _put(self, character: str) -> None:
        if self.column >= self.columns:
            self.row, self.column = self.row + 1, 0
            self.lines.extend([] for _ in range(self.row + 1 - len(self.lines)))
        line = self.lines[self.row]
        line.extend([(" ", INK, False)] * (self.column + 1 - len(line)))
        line[self.column] = (character, self.color, self.bold)
        self.column += 1

    def _control(self, numbers: str, letter: str) -> None:
        count = int(numbers) if numbers.isdigit() else 1
        if letter == "A":
            self.row = max(0, self.row - count)
        elif letter == "B":
            self.row += count
        elif letter == "G":
            self.column = count - 1
        elif letter == "K" and numbers == "2":
            self.lines[self.row] = []
        elif letter in "JK":
            del self.lines[self.row][self.column :]
            if letter == "J":
                del self.lines[self.row + 1 :]
        elif letter == "m":
            self._paint([int(n or 0) for n in numbers.split(";")])

    def _paint(self, codes: Sequence[int]) -> None:
        for code in codes:
            if code in (0, 39):
                self.color = INK
            if code in (0, 22):
                self.bold = False
            if code == 1:
                self.bold = True
            elif code == 2:
                self.color = COLORS[0]
            elif 30 <= code <= 37 or 90 <= code <= 97:
                self.color = COLORS[code % 10]

    def screen(self) -> Screen:
        """Return the last lines that fit."""
        last = [list(line) for line in self.lines]
        while last and not last[-1]:
            last.pop()
        return last[-self.rows :]


def record(
    command: Sequence[str], folder: Path, columns: int, rows: int
) -> list[tuple[float, Screen]]:
    """Run a command; return the screens that it showed, with seconds since its start."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns), "LINES": str(rows)}
    began = time.monotonic()
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    terminal, screens, rest = Terminal(columns, rows), [], b""
    while True:
        try:
            read = os.read(master, 1 << 16)
        except OSError:  # the terminal's other side is closed
            break
        if not read:
            break
        text, rest = _whole(rest + read)
        terminal.write(text)
        screens.append((time.monotonic() - began, terminal.screen()))
    os.close(master)
    if process.wait() != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{terminal.lines}")
    return screens


def _whole(read: bytes) -> tuple[str, bytes]:
    """Return the characters that have arrived in full, and the bytes of the last one if not."""
    for missing in range(4):
        end = len(read) - missing
        try:
            text = read[:end].decode()
        except UnicodeDecodeError:
            continue
        return text, read[end:]
    return read.decode(errors="replace"), b""


def draw(screen: Screen, columns: int, rows: int) -> Image.Image:
    """Draw a screen as a picture."""
    folder = Path(font_manager.findfont("DejaVu Sans Mono")).parent
    plain = ImageFont.truetype(str(folder / "DejaVuSansMono.ttf"), SIZE)
    bold = ImageFont.truetype(str(folder / "DejaVuSansMono-Bold.ttf"), SIZE)
    width, height = plain.getlength("M"), SIZE * 1.3
    image = Image.new("RGB", (round(columns * width) + 32, round(rows * height) + 28), PAPER)
    pen = ImageDraw.Draw(image)
    for row, line in enumerate(screen):
        for column, (character, color, strong) in enumerate(line):
            place = (16 + column * width, 14 + row * height)
            pen.text(place, character, color, bold if strong else plain)
    return image


def colors() -> Image.Image:
    """Return a palette of the colors, each in steps to the background for smooth letters."""
    steps = 5
    paper = ImageColor.getrgb(PAPER)
    palette = list(paper)
    for color in [INK, *COLORS]:
        for step in range(1, steps + 1):
            ink = ImageColor.getrgb(color)
            palette += [
                (p * (steps - step) + i * step) // steps for p, i in zip(paper, ink, strict=True)
            ]
    image = Image.new("P", (1, 1))
    image.putpalette(palette)
    return image


def few_colors(picture: Image.Image) -> Image.Image:
    """Return a picture in the palette, which makes its file small."""
    return picture.quantize(palette=colors(), dither=Image.Dither.NONE)


def film(
    screens: Sequence[tuple[float, Screen]], path: Path, columns: int, rows: int, seconds: float
) -> None:
    """Write screens as a moving picture of at most `seconds`, and a long look at the last one."""
    speed = max(1.0, (screens[-1][0] - screens[0][0]) / seconds)
    chosen: list[tuple[float, Screen]] = []
    for at, screen in screens:
        if chosen and (at - chosen[-1][0]) / speed < 0.3:
            chosen[-1] = (chosen[-1][0], screen)
        else:
            chosen.append((at, screen))
    times = [at / speed for at, _ in chosen]
    shown = [later - at for at, later in itertools.pairwise(times)] + [6.0]
    first, *others = (few_colors(draw(screen, columns, rows)) for _, screen in chosen)
    first.save(
        path,
        save_all=True,
        append_images=others,
        duration=[round(1000 * time) for time in shown],
        loop=0,
        optimize=True,
    )
