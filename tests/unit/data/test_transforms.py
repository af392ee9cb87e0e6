"""Transforms against PyTorch and NumPy, bit for bit, and what they refuse."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cerebro._core as _core
import cerebro.transforms as transforms
from cerebro.errors import InputError
from cerebro.transforms import (
    Cast,
    Normalize,
    Pad,
    RandomCrop,
    RandomHorizontalFlip,
    Scale,
    ToCHW,
    Transform,
    transform_from_json,
)

torch = pytest.importorskip("torch")

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (40, 6, 5, 3), dtype=np.uint8)


@dataclass(frozen=True)
class Column:
    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    ragged: bool = False


def compiled(column: Column, *chain: Transform, augment: bool = True) -> list[Any]:
    return transforms.compile({column.name: column}, {column.name: chain}, augment=augment)


def run(
    folder: Path,
    values: np.ndarray,
    *chain: Transform,
    dtype: str | None = None,
    framework: str = "torch",
    augment: bool = True,
    **options: Any,
) -> Any:
    """One batch of all rows in order."""
    folder.mkdir(exist_ok=True)
    np.save(folder / "x.npy", values)
    dtype = dtype or values.dtype.name
    size = (folder / "x.npy").stat().st_size
    shard = _core.ShardReader(
        folder, len(values), [("x", dtype, values.shape[1:], False, {"x.npy": size})]
    )
    plan = compiled(Column("x", dtype, values.shape[1:]), *chain, augment=augment)
    options = {"batch_size": len(values), "shuffle": False} | options
    epoch = options.pop("epoch", 0)
    loader = _core.Loader([(shard, (0, len(values)))], plan, framework=framework, **options)
    loader.begin([[0]], epoch)
    (batch,) = loader
    return batch["x"]


def run_ragged(
    folder: Path, rows: list[list[Any]], dtype: str, *chain: Transform
) -> dict[str, Any]:
    values = np.array([value for row in rows for value in row], dtype)
    np.save(folder / "t.values.npy", values)
    np.save(folder / "t.offsets.npy", np.cumsum([0] + [len(row) for row in rows]))
    sizes = {path.name: path.stat().st_size for path in folder.glob("t.*.npy")}
    shard = _core.ShardReader(folder, len(rows), [("t", dtype, values.shape[1:], True, sizes)])
    plan = compiled(Column("t", dtype, values.shape[1:], ragged=True), *chain)
    loader = _core.Loader(
        [(shard, (0, len(rows)))], plan, batch_size=len(rows), shuffle=False, framework="numpy"
    )
    loader.begin([[0]], 0)
    (batch,) = loader
    return dict(batch)


def assert_bits(ours: Any, theirs: Any) -> None:
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert ours.is_contiguous()
    assert torch.equal(ours, theirs)


# --- the bits -------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1 / 255, 1 / 3, 2.0, 0.1, 0.3, -1 / 7, 1e-30])
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int32", "int64", "bool", "float32", "float64"])
def test_scale(tmp_path: Path, factor: float, dtype: str) -> None:
    x = RNG.integers(-128, 128, (50, 7)).astype(dtype)
    inverse = round(1 / factor)
    theirs = torch.from_numpy(x)
    theirs = theirs / float(inverse) if inverse and 1 / inverse == factor else theirs * factor
    assert_bits(run(tmp_path, x, Scale(factor)), theirs)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int32", "float32", "float64"])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("chw", [False, True])
def test_images(tmp_path: Path, dtype: str, per_channel: bool, chw: bool) -> None:
    x = IMAGES.astype(dtype)
    chain: list[Transform] = [
        Scale(1 / 255),
        Normalize(MEAN, STD) if per_channel else Normalize(0.5, 0.25),
    ]
    ours = run(tmp_path, x, *chain, *([ToCHW()] if chw else []))
    work = torch.float64 if dtype == "float64" else torch.float32
    mean = torch.tensor(MEAN if per_channel else 0.5, dtype=work)
    std = torch.tensor(STD if per_channel else 0.25, dtype=work)
    theirs = (torch.from_numpy(x) / 255 - mean) / std
    assert_bits(ours, theirs.permute(0, 3, 1, 2).contiguous() if chw else theirs)
    if chw:
        assert_bits(run(tmp_path, x, ToCHW(), *chain), ours)


@pytest.mark.parametrize("n", [1, 39, 1000, 5000])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_features(tmp_path: Path, n: int, dtype: str) -> None:
    """One mean per feature: more of them than there are tables for, than fit one piece."""
    x = RNG.integers(0, 200, (9, n)).astype(dtype)
    mean, std = RNG.standard_normal(n), RNG.uniform(1, 2, n)
    theirs = (torch.from_numpy(x).float() - torch.from_numpy(mean).float()) / torch.from_numpy(
        std
    ).float()
    assert_bits(run(tmp_path, x, Normalize(mean, std)), theirs)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_floats_stay(tmp_path: Path, dtype: str) -> None:
    """Each operation is rounded; scalars as in PyTorch."""
    x = torch.randn(30, 8, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    stored = x.numpy() if dtype == "float16" else x.view(torch.int16).numpy().view(np.uint16)
    ours = run(tmp_path, stored, Scale(1 / 3), Normalize(0.5, 0.7), dtype=dtype)
    assert_bits(ours, (x / 3 - 0.5) / 0.7)


@pytest.mark.parametrize(
    "to", ["float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool"]
)
@pytest.mark.parametrize("dtype", ["uint8", "int16", "int64", "float32", "float64", "bool"])
def test_cast(tmp_path: Path, dtype: str, to: str) -> None:
    x = RNG.integers(0, 100, (20, 3)).astype(dtype)
    if "float" in dtype:
        x += np.asarray(RNG.uniform(0, 1, x.shape), dtype)
    assert_bits(run(tmp_path, x, Cast(to)), torch.from_numpy(x).to(getattr(torch, to)))


def test_casts_out_of_range(tmp_path: Path) -> None:
    x = np.array([-1e30, -1.5, np.nan, 254.99, 1e30, np.inf])
    assert run(tmp_path, x, Cast("uint8"), framework="numpy").tolist() == [0, 0, 0, 254, 255, 255]
    wide = np.array([256, -1, 1 << 40])
    assert run(tmp_path, wide, Cast("uint8"), framework="numpy").tolist() == [0, 255, 0]


def test_chains_of_casts(tmp_path: Path) -> None:
    x = IMAGES[:, 0]
    ours = run(tmp_path, x, Scale(1 / 255), Cast("bfloat16"))
    assert_bits(ours, (torch.from_numpy(x) / 255).to(torch.bfloat16))
    ours = run(tmp_path, x, Cast("float64"), Normalize(MEAN, STD), Cast("float32"))
    mean, std = (torch.tensor(v, dtype=torch.float64) for v in (MEAN, STD))
    assert_bits(ours, ((torch.from_numpy(x).double() - mean) / std).float())


# --- moves ----------------------------------------------------------------------


def test_random_crops_and_flips_match_their_definition(tmp_path: Path) -> None:
    chain = (RandomCrop((5, 4), padding=(1, 2)), RandomHorizontalFlip(), ToCHW())
    ours = run(tmp_path, IMAGES, *chain, framework="numpy", seed=3, epoch=1)
    padded = np.pad(IMAGES, ((0, 0), (1, 1), (2, 2), (0, 0)))
    sides = set()
    for image, source in zip(ours, padded, strict=True):
        options = {
            (y, x, flip): source[y : y + 5, x : x + 4][:, :: -1 if flip else 1]
            for y in range(4)
            for x in range(6)
            for flip in (False, True)
        }
        found = [k for k, v in options.items() if np.array_equal(v.transpose(2, 0, 1), image)]
        assert found
        sides.add(found[0])
    assert len(sides) > 15  # they are not all alike


def test_random_crops_and_flips_are_keyed_by_seed_epoch_and_row(tmp_path: Path) -> None:
    chain = (RandomCrop(3, padding=1), RandomHorizontalFlip(0.3))
    one = run(tmp_path, IMAGES, *chain, seed=1, epoch=1)
    assert torch.equal(one, run(tmp_path, IMAGES, *chain, seed=1, epoch=1, threads=2))
    assert not torch.equal(one, run(tmp_path, IMAGES, *chain, seed=1, epoch=2))
    assert not torch.equal(one, run(tmp_path, IMAGES, *chain, seed=2, epoch=1))
    wide = run(tmp_path, IMAGES.astype(np.float64), *chain, seed=1, epoch=1)
    assert torch.equal(one.double(), wide)  # a column of another type moves alike


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_evaluation_is_not_augmented(tmp_path: Path, dtype: str) -> None:
    x = IMAGES.astype(dtype)
    chain = (RandomCrop((3, 4)), RandomHorizontalFlip(1.0))
    ours = run(tmp_path, x, *chain, augment=False, framework="numpy")
    np.testing.assert_array_equal(ours, x[:, 1:4, 0:4])
    ours = run(tmp_path, x, RandomCrop((8, 5), padding=2), augment=False, framework="numpy")
    np.testing.assert_array_equal(ours, np.pad(x, ((0, 0), (1, 1), (0, 0), (0, 0))))


def test_padding_is_zero_at_its_place_in_the_chain(tmp_path: Path) -> None:
    x = IMAGES[:1, :2, :2]
    first = run(tmp_path, x, RandomCrop(4, padding=1), Normalize(10, 2), augment=False)
    last = run(tmp_path, x, Normalize(10, 2), RandomCrop(4, padding=1), augment=False)
    assert first[0, 0, 0, 0] == -5 and last[0, 0, 0, 0] == 0
    assert torch.equal(first[:, 1:3, 1:3], last[:, 1:3, 1:3])


def test_flip_always_and_never(tmp_path: Path) -> None:
    gray = IMAGES[..., 0]
    ours = run(tmp_path, gray, RandomHorizontalFlip(1), ToCHW(), framework="numpy")
    np.testing.assert_array_equal(ours, gray[:, None, :, ::-1])
    ours = run(tmp_path, gray, RandomHorizontalFlip(0), framework="numpy")
    np.testing.assert_array_equal(ours, gray)


# --- ragged columns ---------------------------------------------------------------


def test_pad(tmp_path: Path) -> None:
    rows = [[1, 2, 3], [], [4, 5, 6, 7, 8]]
    batch = run_ragged(tmp_path, rows, "int32")
    assert batch["t"].tolist() == [[1, 2, 3, 0, 0], [0] * 5, [4, 5, 6, 7, 8]]
    assert batch["t_mask"].sum() == 8 and batch["t_mask"].dtype == np.bool_
    assert batch["t_length"].tolist() == [3, 0, 5] and batch["t_length"].dtype == np.int64
    batch = run_ragged(tmp_path, rows, "int32", Pad(-1, max_length=4), Cast("int64"))
    assert batch["t"].tolist() == [[1, 2, 3, -1], [-1] * 4, [4, 5, 6, 7]]
    assert batch["t"].dtype == np.int64
    assert batch["t_length"].tolist() == [3, 0, 4]
    batch = run_ragged(tmp_path, rows, "int32", Pad(max_length=3, multiple_of=4))
    assert batch["t"].tolist() == [[1, 2, 3, 0], [0] * 4, [4, 5, 6, 0]]
    assert batch["t_mask"].tolist() == [[True] * 3 + [False], [False] * 4, [True] * 3 + [False]]


def test_pad_in_a_chain(tmp_path: Path) -> None:
    rows = [[[1, 2]], [[3, 4], [5, 6]]]
    before = run_ragged(tmp_path, rows, "uint8", Pad(9), Scale(2), Normalize((1, 2), 1))
    assert before["t"].tolist() == [[[1, 2], [17, 16]], [[5, 6], [9, 10]]]
    after = run_ragged(tmp_path, rows, "uint8", Scale(2), Normalize((1, 2), 1), Pad(math.nan))
    assert np.isnan(after["t"][0, 1]).all()
    assert after["t"][1].tolist() == [[5, 6], [9, 10]]


def test_all_rows_empty(tmp_path: Path) -> None:
    batch = run_ragged(tmp_path, [[], []], "float32")
    assert batch["t"].shape == batch["t_mask"].shape == (2, 0)
    assert batch["t_length"].tolist() == [0, 0]


# --- JSON and arguments -------------------------------------------------------------

ALL = [
    Scale(1 / 255),
    Normalize(0.5, 2),
    Normalize(MEAN, STD),
    Cast("bfloat16"),
    ToCHW(),
    RandomCrop(32, padding=4),
    RandomCrop((8, 9), (1, 0)),
    RandomHorizontalFlip(0.25),
    Pad(),
    Pad(-1, max_length=512, multiple_of=64),
]


@pytest.mark.parametrize("transform", ALL, ids=repr)
def test_json_round_trip(transform: Transform) -> None:
    import json

    again = transform_from_json(json.loads(json.dumps(transform.to_json())))
    assert again == transform and hash(again) == hash(transform)


def test_arguments_are_taken_in_many_forms() -> None:
    assert Normalize(np.array(MEAN), torch.tensor(STD, dtype=torch.float64)) == Normalize(MEAN, STD)
    assert Normalize([0.5], [0.25]) == Normalize((0.5,), (0.25,))
    assert Cast(np.float32) == Cast(torch.float32) == Cast(np.dtype("float32")) == Cast("float32")
    assert Cast(torch.bool) == Cast("bool") == Cast(bool)
    assert Cast(torch.int64) == Cast(np.int64)
    assert RandomCrop([3, 4]) == RandomCrop((3, 4))
    assert Scale(np.float64(0.5)) == Scale(0.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Scale(0), "factor must not be 0"),
        (lambda: Scale(math.inf), "factor must be finite"),
        (lambda: Scale("x"), "factor must be a number"),
        (lambda: Normalize(0, 0), "std must not be 0"),
        (lambda: Normalize((0, 1), (1, 0)), "std must not be 0"),
        (lambda: Normalize("0.5", [None]), "std must be a number"),
        (lambda: Cast("object"), "unknown dtype 'object'"),
        (lambda: Cast("complex64"), "unknown dtype"),
        (lambda: RandomCrop(0), "size must be a whole number of at least 1"),
        (lambda: RandomCrop(3.5), "size must be a whole number"),
        (lambda: RandomCrop((3, 4, 5)), "size must be a number or a pair"),
        (lambda: RandomCrop(3, -1), "padding must be a whole number of at least 0"),
        (lambda: RandomHorizontalFlip(1.5), "p must be from 0 to 1"),
        (lambda: Pad("x"), "value must be a number"),
        (lambda: Pad(max_length=0), "max_length must be a whole number of at least 1"),
        (lambda: Pad(multiple_of=0), "multiple_of must be a whole number of at least 1"),
        (lambda: transform_from_json({"name": "Blur"}), "unknown transform"),
        (lambda: transform_from_json({"name": "Pad", "colour": 1}), "Pad: .*colour"),
    ],
)
def test_bad_arguments(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


FLAT = Column("v", "float32", (39,))
IMAGE = Column("img", "uint8", (6, 5, 3))
RAGGED = Column("t", "int32", (), ragged=True)


@pytest.mark.parametrize(
    ("column", "chain", "message"),
    [
        (FLAT, [ToCHW()], r"column 'v': ToCHW needs rows of shape .* not \(39,\)"),
        (FLAT, [RandomHorizontalFlip()], "column 'v': RandomHorizontalFlip needs rows"),
        (RAGGED, [RandomCrop(2)], "column 't': RandomCrop .* not a ragged column"),
        (IMAGE, [ToCHW(), ToCHW()], "column 'img': ToCHW may occur in a chain only once"),
        (IMAGE, [RandomCrop((7, 5))], "column 'img': RandomCrop of 7 x 5 is larger than .* 6 x 5"),
        (IMAGE, [RandomCrop(3), RandomCrop(4)], "RandomCrop of 4 x 4 is larger than .* 3 x 3"),
        (IMAGE, [Normalize((1, 2), 1)], "column 'img': Normalize has 2 means for 3 channels"),
        (FLAT, [Normalize(0, (1, 2))], "Normalize has 2 standard deviations for 39 channels"),
        (FLAT, [Pad()], "column 'v': Pad is for ragged columns"),
        (RAGGED, [Pad(), Pad()], "column 't': Pad may occur in a chain only once"),
        (RAGGED, [Pad(0.5)], "column 't': Pad: 0.5 is not a value of type int32"),
        (RAGGED, [Cast("uint8"), Pad(-1)], "Pad: -1 is not a value of type uint8"),
        (Column("z", "complex64"), [Scale()], "column 'z': Scale does not take complex64"),
        (Column("z", "complex64"), [Normalize(0, 1)], "Normalize does not take complex64"),
        (Column("z", "complex64"), [Cast("float32")], "Cast does not take complex64"),
        (FLAT, [Scale()] * 33, "33 transforms; a chain may have at most 32"),
        (FLAT, ["Scale"], "column 'v': 'Scale' is not a transform"),
    ],
)
def test_chains_that_do_not_fit(column: Column, chain: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        compiled(column, *chain)


def test_unknown_columns_are_refused() -> None:
    with pytest.raises(InputError, match="column 'w', which does not exist; there are v"):
        transforms.compile({"v": FLAT}, {"w": [Scale()]})


# --- channels last --------------------------------------------------------------

LAST_CHAINS: list[list[Transform]] = [
    [ToCHW()],
    [ToCHW(), Scale(1 / 255), Normalize(MEAN, STD)],
    [RandomCrop((5, 4), padding=2), RandomHorizontalFlip(), Scale(1 / 255), ToCHW()],
    [ToCHW(), RandomCrop(4), Cast("bfloat16")],
]


def with_channels_last(folder: Path, values: np.ndarray, *chain: Transform, **options: Any) -> Any:
    column = Column("x", values.dtype.name, values.shape[1:])
    plan = transforms.compile({"x": column}, {"x": chain}, channels_last=True)
    size = (folder / "x.npy").stat().st_size
    shard = _core.ShardReader(
        folder, len(values), [("x", column.dtype, column.shape, False, {"x.npy": size})]
    )
    loader = _core.Loader(
        [(shard, (0, len(values)))], plan, batch_size=len(values), shuffle=False, **options
    )
    loader.begin([[0]], 0)
    (batch,) = loader
    return batch["x"]


@pytest.mark.parametrize("chain", LAST_CHAINS)
def test_channels_last(tmp_path: Path, chain: list[Transform]) -> None:
    usual = run(tmp_path, IMAGES, *chain)
    last = with_channels_last(tmp_path, IMAGES, *chain)
    assert last.dtype == usual.dtype
    assert torch.equal(last, usual)
    assert last.stride() == usual.to(memory_format=torch.channels_last).stride()


@pytest.mark.parametrize(
    ("values", "chain"),
    [
        (IMAGES, [Scale(1 / 255)]),
        (IMAGES[..., :1], [ToCHW()]),
        (IMAGES[..., 0], [ToCHW()]),
    ],
)
def test_other_columns_stay_in_c_order(
    tmp_path: Path, values: np.ndarray, chain: list[Transform]
) -> None:
    values = np.ascontiguousarray(values)
    assert_bits(run(tmp_path, values, *chain), with_channels_last(tmp_path, values, *chain))


def test_channels_last_needs_a_framework_with_strides(tmp_path: Path) -> None:
    run(tmp_path, IMAGES, ToCHW())
    with pytest.raises(ValueError, match="channels_last needs framework torch or dlpack"):
        with_channels_last(tmp_path, IMAGES, ToCHW(), framework="numpy")
    tensor = with_channels_last(tmp_path, IMAGES, ToCHW(), framework="dlpack")
    assert np.array_equal(np.from_dlpack(tensor), np.moveaxis(IMAGES, 3, 1))
    assert np.array_equal(np.asarray(memoryview(tensor)), np.moveaxis(IMAGES, 3, 1))
    with pytest.raises(BufferError, match="C order needs a copy"):
        np.frombuffer(tensor, np.uint8)
