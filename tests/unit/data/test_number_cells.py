"""In a column of numbers, a cell that is not one is named, wherever the column comes from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cerebro import InputError, shard
from cerebro.data.dtypes import find_bad_cell, find_first_text
from cerebro.data.given_rows import write

CELLS = ["130", "95", "?", "165"]
NAMED = (
    r"column 'p' holds numbers, but '\?' in row 2: correct the cell"
    r"|column 'p', row 2 is str, but others are numbers: it is '\?': correct the cell"
)


TICKETS = [str(row) if row % 4 else f"A/5 {row}" for row in range(100)]


def csv(folder: Path) -> Any:
    (folder / "a.csv").write_text("p,y\n" + "".join(f"{cell},0\n" for cell in CELLS))
    return folder / "a.csv"


def parquet(folder: Path) -> Any:
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(arrow(folder), folder / "a.parquet")
    return folder / "a.parquet"


def arrow(_: Path) -> Any:
    return pytest.importorskip("pyarrow").table({"p": CELLS})


def frame_of(values: Any) -> Callable[[Path], Any]:
    return lambda _: pytest.importorskip("pandas").DataFrame({"p": values()})


def strings() -> Any:
    return pytest.importorskip("pandas").array(CELLS, dtype="string")


def huggingface(_: Path) -> Any:
    return pytest.importorskip("datasets").Dataset.from_dict({"p": CELLS})


@pytest.mark.parametrize(
    "source",
    [
        csv,
        parquet,
        arrow,
        huggingface,
        frame_of(lambda: CELLS),
        frame_of(lambda: [130, 95, "?", 165]),
        frame_of(strings),
        lambda _: {"p": CELLS},
        lambda _: {"p": [130, 95.5, "?", 165]},
        lambda _: {"p": np.array(CELLS)},
        lambda _: {"p": np.array([130, 95, "?", 165], object)},
        lambda _: {"p": np.array([["1", "2"], ["3", "4"], ["?", "5"]])},
        lambda _: {"p": np.array([[1, 2], [3, 4], ["?", 5]], object)},
        lambda _: [{"p": cell} for cell in CELLS],
        lambda _: ({"p": cell} for cell in CELLS),
    ],
)
def test_the_error_names_a_non_numeric_cell_from_any_source(
    tmp_path: Path, source: Callable[[Path], Any]
) -> None:
    with pytest.raises(InputError, match=NAMED):
        shard(source(tmp_path), tmp_path / "d")
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtypes": {"x": "float32"}, "columns": {"x": "p"}},
        {"columns": {"x": ["p", "y"]}},
        {"columns": {"x": ["p", "y"]}, "dtypes": {"x": "float32"}},
    ],
)
def test_the_error_names_a_non_numeric_cell_under_any_layout(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(InputError, match=NAMED):
        shard(csv(tmp_path), tmp_path / "d", **options)


@pytest.mark.parametrize(
    ("cells", "row", "cell"),
    [
        (["900", "1,000", "2,500"], 1, "1,000"),
        (["5%", "7%", "12%"], 0, "5%"),
        (["$5", "$7.50", "3"], 0, r"\$5"),
        (["1,5", "2,25", "3"], 0, "1,5"),
        (["1", "n/a", "2"], 1, "n/a"),
        (["1", "2", "3+", "4"], 2, r"3\+"),
        (["?"] * 7 + ["1", "2", "3"], 0, r"\?"),  # most of its different cells are numbers
        (["1", "2", " "], 2, " "),
        (["nan", "1", "x", "2", "nan"], 2, "x"),
        (["36", "38", "M"], 2, "M"),
        ([*map(str, range(98)), "NA", "?"], 98, "NA"),
        ([*map(str, range(90)), *map("u{}".format, range(10))], 90, "u0"),  # a tenth
        ([*map(str, range(8)), *"ABCDE"], 8, "A"),  # five different ones
        ([f"{number}%" for number in range(50)], 0, "0%"),
    ],
)
def test_the_error_names_a_cell_that_is_not_a_plain_number(
    tmp_path: Path, cells: list[str], row: int, cell: str
) -> None:
    with pytest.raises(InputError, match=f"'p' holds numbers, but '{cell}' in row {row}:"):
        shard({"p": cells}, tmp_path / "d")


@pytest.mark.parametrize(
    "cells",
    [
        ["red", "green", "7"],
        ["2024-01-05", "2024-01-06", "2024-01-07"],
        ["10:30", "11:45", "12:00"],
        ["1.2.3", "1.2.4", "1.3.0"],
        ["a1", "b2", "c3"],
        ["18-25", "26-35", "36-50"],
        ["1", "2", "3"],  # their type says that they are text
        ["true", "false", "1", "0"],
        ["nan", "NaN", "C85", "NaN"],
        ["inf", "C", "infinity"],
        ["-inf", "NAN", "x"],
        ["nan", "nan", "1", "x", "y"],
        TICKETS,
        [*map(str, range(8)), *"ABCDEF"],
    ],
)
def test_text_stays_categories(tmp_path: Path, cells: list[str]) -> None:
    data = shard({"p": cells}, tmp_path / "d", shards=1, shuffle=False)
    classes = data.classes["p"]
    assert classes is not None and classes == sorted(set(cells))
    assert [classes[code] for code in data.shard(0)["p"]] == cells


@pytest.mark.parametrize("cells", [["nan", "NaN", "C85", "NaN"], ["inf", "C", "infinity"]])
def test_nan_and_inf_cells_alone_do_not_make_a_column_numeric(
    tmp_path: Path, cells: list[str]
) -> None:
    (tmp_path / "a.csv").write_text("p,y\n" + "".join(f"{cell},0\n" for cell in cells))
    pd = pytest.importorskip("pandas")
    for number, source in enumerate([tmp_path / "a.csv", pd.DataFrame({"p": cells}, dtype=object)]):
        data = shard(source, tmp_path / f"d{number}")
        assert data.classes["p"] == sorted(set(cells))


def test_one_text_after_many_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("p\n" + "\n".join(map(str, range(200_000))) + "\nx\n")
    with pytest.raises(InputError, match="'p' holds numbers, but 'x' in row 200000:"):
        shard(tmp_path / "a.csv", tmp_path / "d")

    def rows(first: Any, then: Any) -> Iterator[dict[str, Any]]:
        for row in range(5000):
            yield {"p": first if row < 4096 else then}

    with pytest.raises(InputError, match="'p' holds numbers, but 'x' in row 4096:"):
        shard(rows(1, "x"), tmp_path / "d")
    with pytest.raises(InputError, match=r"begins with strings \('x'\), and row 4096 has numbers"):
        shard(rows("x", 1), tmp_path / "d")


def test_lists_of_tokens_are_text(tmp_path: Path) -> None:
    for number, lists in enumerate([[["the", "1", "2"], ["3"]], [["1", "2"], ["3", "?"]]]):
        data = shard({"p": lists}, tmp_path / f"d{number}", shards=1)
        assert data.columns["p"].ragged
        assert data.classes["p"] == sorted({cell for cells in lists for cell in cells})
    rows = {"p": [["1", "2"], ["3", "?"]], "t": TICKETS[:2], "v": [1, 2]}
    for stack in (["p", "v"], ["t", "v"]):
        with pytest.raises(InputError, match=r"is text .* cannot be stacked into 'x' with numbers"):
            shard(rows, tmp_path / "d", columns={"x": stack})
    for name in "pt":
        with pytest.raises(InputError, match=f"column '{name}' holds categories .*: float32"):
            shard(rows, tmp_path / "d", dtypes={name: "float32"})


def test_an_in_memory_column_can_be_declared_categorical(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    pa = pytest.importorskip("pyarrow")
    frame, table = pd.DataFrame({"p": CELLS, "v": [1, 2, 3, 4]}), pa.table({"p": CELLS})
    declared = frame.assign(p=frame["p"].astype("category"))
    for number, (source, cure, cured) in enumerate(
        [
            (frame, r"frame\['p'\].astype\('category'\)", declared),
            (table, r"table\['p'\].dictionary_encode\(\)",
             pa.table({"p": table["p"].dictionary_encode()})),
            ({"p": CELLS}, r"'p': pandas.Categorical\(...\)", {"p": pd.Categorical(CELLS)}),
        ]
    ):  # fmt: skip
        folder = tmp_path / f"{number}"
        with pytest.raises(InputError, match=f"'p' holds numbers, .*, declare the column: {cure}$"):
            write(source, folder)
        assert set(write(cured, folder).classes["p"] or ()) == set(CELLS)
    cure = r"give the frame itself as the source, with frame\['p'\].astype\('category'\)$"
    with pytest.raises(InputError, match=f"'p' holds numbers, .*{cure}"):
        write({"x": frame}, tmp_path / "d")


def test_codes_can_be_read_as_text(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("zip,code,v\n00501,1,1\n10001,2,2\n00501,x,3\n")
    with pytest.raises(InputError, match=r"'x' in row 2: .* dtypes=\{'code': 'str'\}\)$"):
        shard(tmp_path / "a.csv", tmp_path / "a")
    for number, text in enumerate(["str", "string", str]):
        data = shard(
            tmp_path / "a.csv",
            tmp_path / f"d{number}",
            shards=1,
            shuffle=False,
            columns={"place": "zip", "code": "code", "v": "v"},
            dtypes={"place": text, "code": text},
        )
        assert data.classes == {"place": ["00501", "10001"], "code": ["1", "2", "x"], "v": None}
        assert data.shard(0)["place"].tolist() == [0, 1, 0]
        assert data.shards.manifest.arguments["dtypes"] == {"place": "str", "code": "str"}
    with pytest.raises(InputError, match="makes 'zip' text, but the source has int64"):
        shard({"zip": [501, 10001]}, tmp_path / "e", dtypes={"zip": "str"})
    with pytest.raises(InputError, match="makes 'x' text, but it is a stack"):
        shard(tmp_path / "a.csv", tmp_path / "e", columns={"x": ["zip", "v"]}, dtypes={"x": "str"})


def test_text_is_not_stacked_with_numbers(tmp_path: Path) -> None:
    rows = {"city": ["Rome", "Oslo", "Rome"], "zip": ["1", "2", "3"], "kind": ["a", "b", "a"],
            "v": [1, 2, 3]}  # fmt: skip
    for stack, cell in ((["v", "city"], "'city' is text .'Rome' in row 0."),
                        (["zip", "v"], "'zip' is text .'1' in row 0.")):  # fmt: skip
        with pytest.raises(InputError, match=f"{cell} and cannot be stacked into 'x' with numbers"):
            shard(rows, tmp_path / "d", columns={"x": stack})
    with pytest.raises(
        InputError, match=r"'city' is text .* with float32, which cannot hold codes"
    ):
        shard(rows, tmp_path / "d", columns={"x": ["city", "kind"]}, dtypes={"x": "float32"})
    with pytest.raises(InputError, match=r"'city' holds categories .'Rome' in row 0.: float32"):
        shard(rows, tmp_path / "d", dtypes={"city": "float32"})
    data = shard(rows, tmp_path / "d", shards=1, shuffle=False, columns={"x": ["city", "kind"]})
    assert data.shard(0)["x"].tolist() == [[1, 0], [0, 1], [1, 0]]


def test_the_error_names_the_column_of_a_frame(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"weight": [1.0, 2.0, 3.0], "power": ["130", "?", "165"]})
    for table in (frame, frame[["power"]]):
        with pytest.raises(InputError, match=r"column 'power' holds numbers, but '\?' in row 1:"):
            shard((table, [0, 1, 0]), tmp_path / "d")
    with pytest.raises(InputError, match=r"'name' has text: convert it to numbers \('a' in row 0"):
        shard((pd.DataFrame({"v": [1, 2], "name": ["a", "b"]}), [0, 1]), tmp_path / "d")


def test_search_cv_names_the_cell() -> None:
    pytest.importorskip("sklearn")
    pd = pytest.importorskip("pandas")
    from sklearn.linear_model import SGDClassifier, SGDRegressor

    from cerebro.sklearn import SearchCV

    x = pd.DataFrame({"a": np.arange(20.0), "power": ["1"] * 19 + ["?"]})
    with pytest.raises(InputError, match=r"column 'power' holds numbers, but '\?' in row 19"):
        SearchCV(SGDClassifier(), {"alpha": [1e-3]}, n_trials=1).fit(x, [0, 1] * 10)
    with pytest.raises(InputError, match=r"column 'X\[:, 1\]' holds numbers, but '\?' in row 19"):
        SearchCV(SGDClassifier(), {"alpha": [1e-3]}, n_trials=1).fit(x.to_numpy(), [0, 1] * 10)
    with pytest.raises(InputError, match=r"column 'y' holds numbers, but '\?' in row 19"):
        SearchCV(SGDRegressor(), {"alpha": [1e-3]}, n_trials=1).fit(x[["a"]], list(x["power"]))


def test_the_first_non_numeric_cell_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cerebro.data.dtypes._PIECE", 2)
    names, codes = ["1", "?", "2", "n/a"], np.array([[0, 2, 2], [0, 3, 1]])
    assert find_bad_cell(names, codes) == 4
    assert find_bad_cell(names, codes[:1]) is None  # unused names do not count
    assert find_bad_cell(["a", "1"], np.array([0, 1])) is None
    assert find_first_text(names, codes) == 4
    assert find_first_text(["1", "2"], codes[:, :1] // 2) == 0
