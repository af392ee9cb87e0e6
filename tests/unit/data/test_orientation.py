"""Images are turned as their EXIF orientation says, from any source of images."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cerebro import images, shard

Image = pytest.importorskip("PIL.Image")

UPRIGHT = np.arange(6 * 4 * 3, dtype=np.uint8).reshape(6, 4, 3) * 3

# What a camera stores for each orientation, so that the picture is UPRIGHT.
STORED = {
    1: UPRIGHT,
    2: UPRIGHT[:, ::-1],
    3: UPRIGHT[::-1, ::-1],
    4: UPRIGHT[::-1],
    5: UPRIGHT.transpose(1, 0, 2),
    6: UPRIGHT.transpose(1, 0, 2)[::-1],
    7: UPRIGHT.transpose(1, 0, 2)[::-1, ::-1],
    8: UPRIGHT.transpose(1, 0, 2)[:, ::-1],
}


def encoded(orientation: int, kind: str = "PNG") -> bytes:
    image = Image.fromarray(np.ascontiguousarray(STORED[orientation]))
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    image.save(buffer, kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    return buffer.getvalue()


def opened(orientation: int) -> Any:
    return Image.open(io.BytesIO(encoded(orientation)))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP"])
def test_images_in_folders_are_turned_upright(tmp_path: Path, kind: str) -> None:
    (tmp_path / "in" / "pet").mkdir(parents=True)
    for orientation in STORED:
        path = tmp_path / "in" / "pet" / f"{orientation}.{kind.lower()}"
        path.write_bytes(encoded(orientation, kind))
    data = shard(images(tmp_path / "in"), tmp_path / "d", shards=1, shuffle=False)
    for pixels in data.shard(0)["x"]:
        assert np.array_equal(pixels, UPRIGHT)


def rows() -> Iterator[dict[str, Any]]:
    for orientation in STORED:
        yield {"x": opened(orientation)}


@pytest.mark.parametrize(
    "source", [rows, lambda: list(rows()), lambda: {"x": [opened(i) for i in STORED]}]
)
def test_images_in_rows_are_turned_upright(tmp_path: Path, source: Any) -> None:
    data = shard(source(), tmp_path / "d", shards=1, shuffle=False)
    for pixels in data.shard(0)["x"]:
        assert np.array_equal(pixels, UPRIGHT)


def test_images_of_torch_datasets_are_turned_upright(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    class Pictures(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return len(STORED)

        def __getitem__(self, index: int) -> Any:
            return opened(index + 1).convert("RGB"), index

    data = shard(Pictures(), tmp_path / "d", shards=1, shuffle=False)
    for pixels in data.shard(0)["x"]:
        assert np.array_equal(pixels, UPRIGHT)


def test_hugging_face_images_are_turned_upright(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    paths = []
    for orientation in STORED:
        paths.append(str(tmp_path / f"{orientation}.png"))
        Path(paths[-1]).write_bytes(encoded(orientation))
    source = datasets.Dataset.from_dict({"x": paths}).cast_column("x", datasets.Image())
    data = shard(source, tmp_path / "d", shards=1, shuffle=False)
    for pixels in data.shard(0)["x"]:
        assert np.array_equal(pixels, UPRIGHT)


def test_damaged_metadata_leave_the_pixels(tmp_path: Path) -> None:
    image = Image.fromarray(UPRIGHT)
    image.info["exif"] = b"Exif\x00\x00II*\x00\xff\xff\xff\xff"
    data = shard([{"x": image}], tmp_path / "d", shards=1)
    assert np.array_equal(data.shard(0)["x"][0], UPRIGHT)
