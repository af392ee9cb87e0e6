"""Folders of images: one subfolder per class."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np

from cerebro.arguments import check_one_of
from cerebro.data.columns import ColumnData, turn_upright
from cerebro.data.dtypes import Array
from cerebro.data.manifest import checksum_of
from cerebro.data.sources.base import Source, Table, choose_columns
from cerebro.errors import InputError
from cerebro.machine.files import path_of
from cerebro.machine.imports import import_extra

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
CHUNK_IMAGES = 256
MOST_NAMES = 20  # of images that are left out
CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4}


def images(
    folder: str | os.PathLike[str],
    size: int | tuple[int, int] | None = None,
    mode: str = "RGB",
    errors: Literal["raise", "skip"] = "raise",
) -> ImagesSource:
    """Return a source for `cerebro.shard`: the images in the class folders of a folder.

    The columns are ``x``, uint8 of shape ``(height, width, channels)``, and ``y``, the class: the
    index of the image's class folder in the sorted folder names, which become the class names.
    Images may be in nested folders of a class folder. They are turned as their EXIF orientation
    says.

    Parameters
    ----------
    folder
        The folder with one subfolder per class.
    size
        ``(height, width)``, or one number for both: images are resized (bilinear, antialiased) to
        this, regardless of their shape. None: all must have the same size.
    mode
        ``"RGB"``, ``"L"`` (gray, 1 channel) or ``"RGBA"``.
    errors
        What a file does that cannot be decoded: ``"raise"`` an error, or be left out (``"skip"``)
        with a warning that counts and names such files.

    Raises
    ------
    InputError
        An argument is invalid, the folder is missing or has no images, or Pillow is not installed.
        An image of more than 8 bits is an error when it is read.
    """
    return ImagesSource(path_of("folder", folder), size, mode, errors)


def holds_class_folders(folder: Path) -> bool:
    """Return whether a folder has images, all of them in subfolders."""
    return not any(map(_is_image, folder.iterdir())) and any(
        _is_image(path)
        for child in folder.iterdir()
        if child.is_dir() and not child.name.startswith(".")
        for path in child.rglob("*")
    )


class ImagesSource(Source):
    """Decode images in threads, a few hundred at a time; see `images`."""

    kind = "images"

    def __init__(
        self,
        folder: Path,
        size: int | tuple[int, int] | None = None,
        mode: str = "RGB",
        errors: str = "raise",
    ) -> None:
        check_one_of("errors", errors, ("raise", "skip"))
        if mode not in CHANNELS:
            raise InputError(f"mode is {mode!r}: it must be one of {', '.join(CHANNELS)}")
        if not folder.is_dir():
            raise InputError(f"no folder '{folder}'")
        import_extra("PIL", "images", "reading images needs Pillow")
        self.folder = folder
        pair = (size, size) if isinstance(size, int) else size
        if pair is not None and (
            len(pair) != 2 or any(not isinstance(n, int) or n < 1 for n in pair)
        ):
            raise InputError(f"size is {size!r}: give one number of pixels or (height, width)")
        self.size = None if pair is None else (int(pair[0]), int(pair[1]))
        self.mode = mode
        self._skips = errors == "skip"
        folders = [
            (child.name, sorted(path for path in child.rglob("*") if _is_image(path)))
            for child in folder.iterdir()
            if child.is_dir() and not child.name.startswith(".")
        ]
        self.files = {name: paths for name, paths in sorted(folders) if paths}
        if not self.files:
            raise InputError(
                f"'{folder}' has no class folders with images: put the images of each class into a "
                f"separate folder (supported: {' '.join(SUFFIXES)})"
            )

    def fingerprint(self) -> str:
        listing = [
            [str(path.relative_to(self.folder)), path.stat().st_size, path.stat().st_mtime_ns]
            for paths in self.files.values()
            for path in paths
        ]
        return f"images:{checksum_of([listing, self.size, self.mode, self._skips])}"

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        names = list(self.files)
        labelled = [(path, code) for code, name in enumerate(names) for path in self.files[name]]
        columns = choose_columns(["x", "y"], wanted)
        shape = None
        skipped: list[Path] = []
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            for start in range(0, len(labelled), CHUNK_IMAGES):
                chunk = labelled[start : start + CHUNK_IMAGES]
                read = list(pool.map(self._read, [path for path, _ in chunk]))
                skipped += [c[0] for c, e in zip(chunk, read, strict=True) if e is None]
                chunk = [c for c, e in zip(chunk, read, strict=True) if e is not None]
                decoded = [e for e in read if e is not None]
                if not decoded:
                    continue
                shape = shape or decoded[0].shape
                for (path, _), pixels in zip(chunk, decoded, strict=True):
                    if pixels.shape != shape:
                        raise InputError(
                            f"'{path}' has {pixels.shape[0]} x {pixels.shape[1]} pixels, but "
                            f"images before it have {shape[0]} x {shape[1]}: give "
                            "images(..., size=(height, width))"
                        )
                codes = np.array([code for _, code in chunk], np.int64)
                table = {
                    "x": ColumnData(np.stack(decoded), "uint8"),
                    "y": ColumnData(codes, "int64", None, names, ordered=True),
                }
                yield {name: table[name] for name in columns}
        if shape is None:
            raise InputError(f"none of the {len(labelled)} images in '{self.folder}' can be read")
        if skipped:
            told = ", ".join(str(path.relative_to(self.folder)) for path in skipped[:MOST_NAMES])
            more = f" and {len(skipped) - MOST_NAMES} more" if len(skipped) > MOST_NAMES else ""
            self.remark = (
                f"{len(skipped)} of {len(labelled)} images in '{self.folder}' cannot be read and "
                f"are left out: {told}{more}"
            )

    def _read(self, path: Path) -> Array | None:
        """Return an image's pixels; None if it is damaged and such images are skipped."""
        try:
            return self._decode(path)
        except InputError:
            if not self._skips:
                raise
            return None

    def _decode(self, path: Path) -> Array:
        from PIL import Image

        try:
            with Image.open(path) as image:
                # Pillow's modes of 16-bit integers (I;16 and others), 32-bit ones (I), floats (F).
                if image.mode.startswith(("I", "F")):
                    raise InputError(
                        f"'{path}' has pixels of more than 8 bits (Pillow's mode {image.mode}), "
                        "which would be cut off at 255: convert the images to 8 bits first, or "
                        "give their pixels as arrays"
                    )
                image = turn_upright(image).convert(self.mode)
                if self.size is not None:
                    height, width = self.size
                    image = image.resize((width, height), Image.Resampling.BILINEAR)
                pixels = np.asarray(image, np.uint8)
        except InputError:
            raise
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise InputError(
                f"'{path}' is not an image or is damaged: {error}; repair or remove it, or give "
                'cerebro.images(..., errors="skip")'
            ) from None
        return pixels.reshape(*pixels.shape[:2], CHANNELS[self.mode])


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in SUFFIXES and path.is_file() and not path.name.startswith(".")
