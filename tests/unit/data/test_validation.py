"""Which rows folds have: every row held out once, classes in proportion, groups together."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cerebro
from cerebro import KFold
from cerebro.data import Dataset, shard
from cerebro.data.validation import Folds, describe_other_numbers, make_folds, make_validation
from cerebro.errors import InputError
from cerebro.transforms import Cast, Normalize, Pad, RandomCrop, Scale

ROWS, SHARDS = 103, 4


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Column ``n`` numbers the rows; classes have 60, 30, 10 and 3 rows, groups 1 to 14."""
    classes = np.repeat(["ant", "bee", "cat", "dog"], [60, 30, 10, 3])
    groups = np.repeat(np.arange(13), np.arange(1, 14))
    columns = {
        "n": np.arange(ROWS),
        "kind": [str(name) for name in classes],
        "group": np.append(groups, np.full(ROWS - len(groups), 13)),
        "real": np.linspace(0, 1, ROWS),
        "wide": np.zeros((ROWS, 2), np.int64),
        "square": np.zeros((ROWS, 2, 2), np.float32),
        "ragged": [np.arange(i % 3) for i in range(ROWS)],
    }
    return shard(columns, tmp_path_factory.mktemp("data") / "set", shards=SHARDS, seed=5)


def column(view: Dataset, name: str) -> list[int]:
    return [int(v) for index in range(view.num_shards) for v in view.shard(index)[name]]


def sizes(views: list[Dataset]) -> list[int]:
    return [len(view) for view in views]


def test_every_row_is_held_out_once_and_trains_otherwise(data: Dataset) -> None:
    pairs = KFold(5).split(data)
    held_out = [column(view, "n") for _, view in pairs]
    assert sorted(row for rows in held_out for row in rows) == list(range(ROWS))
    assert sorted(map(len, held_out)) == [20, 20, 21, 21, 21]
    for (train, _), held in zip(pairs, held_out, strict=True):
        assert sorted(column(train, "n") + held) == list(range(ROWS))
        assert train.num_shards == SHARDS
    # Every shard gives a fifth of its rows, to the row.
    for _, view in pairs:
        assert set(view.view.shard_rows) <= {5, 6}


def test_folds_depend_on_the_seed_alone(data: Dataset) -> None:
    first, again, other = (
        [view.checksum for pair in KFold(3, seed=seed).split(data) for view in pair]
        for seed in (1, 1, 2)
    )
    assert first == again
    assert not set(first) & set(other)


def test_classes_keep_their_proportions(data: Dataset) -> None:
    names = data.classes["kind"]
    assert names is not None
    for _, view in KFold(3, stratify="kind").split(data):
        counts = np.bincount(column(view, "kind"), minlength=4)
        assert dict(zip(names, counts.tolist(), strict=True)) == {
            "ant": 20,
            "bee": 10,
            "cat": counts[names.index("cat")],
            "dog": 1,
        }
        assert counts[names.index("cat")] in (3, 4)
    views = [view for _, view in KFold(3, stratify="kind").split(data)]
    assert sorted(sizes(views)) == [34, 34, 35]


def test_groups_are_never_on_both_sides(data: Dataset) -> None:
    seen: list[int] = []
    for train, view in KFold(4, groups="group", seed=3).split(data):
        held = set(column(view, "group"))
        assert held and not held & set(column(train, "group"))
        assert len(train) + len(view) == ROWS
        seen += sorted(held)
    assert sorted(seen) == list(range(14))


@pytest.mark.parametrize("seed", range(3))
def test_folds_are_as_equal_as_groups_allow(tmp_path: Path, seed: int) -> None:
    groups = np.r_[np.zeros(50, int), np.ones(50, int), np.arange(2, 102)]
    data = shard({"group": groups}, tmp_path / "d", progress=False)
    folds = KFold(4, groups="group", seed=seed).split(data)
    assert [len(view) for _, view in folds] == [50] * 4


def test_folds_of_a_view_cover_exactly_its_rows(data: Dataset) -> None:
    part = data.select(slice(10, 61))
    rows = set(column(part, "n"))
    for train, view in KFold(2).split(part):
        assert set(column(train, "n")) | set(column(view, "n")) == rows
        assert len(train) + len(view) == 51


def test_a_view_that_repeats_rows_has_no_folds(data: Dataset) -> None:
    again = data.select(np.repeat(np.arange(40), 3))
    for kfold in (KFold(3), KFold(3, stratify="group"), Splitter(([0, 1], [2]))):
        with pytest.raises(InputError) as caught:
            make_validation(again, kfold)
        assert str(caught.value) == (
            f"{kfold!r}: this view repeats rows, so that folds would train on rows that they hold "
            "out: give each row once (Dataset.with_sampling trains on some rows more often), or "
            "give groups=, whose rows stay together"
        )
    with pytest.raises(InputError, match="split: this view repeats rows"):
        make_validation(again, 0.2)
    # Rows of a group stay together, so that repeated ones do; but splitters may ignore groups.
    for train, view in KFold(3, groups="group").split(again):
        assert not {*column(train, "n")} & {*column(view, "n")}
        assert len(train) + len(view) == 120
    apart = KFold(Splitter(([0, 1, 2], [3, 4, 5])), groups="group").split(again)
    assert [column(view, "n") for view in apart[0]] == [[n] * 3 for n in column(data, "n")[:2]]
    with pytest.raises(InputError) as caught:
        KFold(Splitter(([0, 1], [3]), ([0, 3], [5])), groups="group").split(again)
    assert str(caught.value) == (
        "Splitter(), fold 1: row 1 of shard 0 is on both sides, because this view repeats it: "
        "give each row once (Dataset.with_sampling trains on some rows more often)"
    )


def test_as_many_folds_as_rows(data: Dataset) -> None:
    few = data.select([0, 40, 80])
    assert sizes([view for _, view in KFold(3).split(few)]) == [1, 1, 1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KFold(1), "KFold: n must be a whole number from 2 to 10000, not 1"),
        (lambda: KFold(2.5), "KFold: n must be a whole number"),
        (lambda: KFold("5"), "KFold: n must be a whole number"),
        (lambda: KFold(True), "KFold: n must be a whole number"),
        (lambda: KFold(3, seed=-1), "KFold: seed must be a whole number"),
        (lambda: KFold(3, stratify="kind", groups="group"), "not both: choose one"),
    ],
)
def test_invalid_fold_arguments_are_refused(make: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("kfold", "message"),
    [
        (KFold(104), r"KFold\(104\) needs a row for each fold, but the data has 103"),
        (
            KFold(5, stratify="kind"),
            r"class 'dog' of column 'kind' has 3 rows, so that 2 of the 5 folds would have none "
            "of it: use at most 3 folds, leave the class out",
        ),
        (KFold(15, groups="group"), "has 14 groups, fewer than the 15 folds: use at most 14"),
        (KFold(3, groups="none"), "no column 'none': the dataset has n, kind"),
        (KFold(3, stratify="none"), "no column 'none'"),
        (KFold(3, stratify="ragged"), "column 'ragged' cannot define classes or groups"),
        (KFold(3, stratify="wide"), "column 'wide' cannot define classes or groups"),
        (KFold(3, stratify="real"), "column 'real' cannot define classes or groups"),
        (KFold(3, groups="real"), "column 'real' cannot define classes or groups"),
    ],
)
def test_folds_that_do_not_fit_the_data(data: Dataset, kfold: KFold, message: str) -> None:
    with pytest.raises(InputError, match=message):
        kfold.split(data)


def test_the_error_names_a_numeric_class_by_its_value(data: Dataset) -> None:
    with pytest.raises(InputError, match="class 0 of column 'group' has 1 row, so that 2 of the 3"):
        KFold(3, stratify="group").split(data)


class Splitter:
    """A splitter that gives what it was made with."""

    def __init__(self, *pairs: Any) -> None:
        self.pairs = pairs

    def get_n_splits(self) -> int:
        return len(self.pairs)

    def split(self, x: Any, y: Any = None, groups: Any = None) -> Any:
        self.given = x.shape, y, groups
        return iter(self.pairs)

    def __repr__(self) -> str:
        return "Splitter()"


def test_a_splitter_chooses_the_rows(data: Dataset) -> None:
    splitter = Splitter(([50, 3, 4], [1]), (np.array([0, 1, 2]), np.array([99, 98])))
    (train, held), (_, second) = KFold(splitter, stratify="real", groups="group").split(data)
    order = column(data, "n")
    assert column(train, "n") == [order[row] for row in (3, 4, 50)]
    assert column(held, "n") == [order[1]]
    assert column(second, "n") == [order[98], order[99]]
    shape, y, groups = splitter.given
    assert shape == (ROWS, 1)
    assert groups.tolist() == column(data, "group")
    assert y.tolist() == [float(v) for i in range(SHARDS) for v in data.shard(i)["real"]]
    assert make_validation(data, splitter).folds is not None


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "gives 0 folds"),
        ([([0, 1], [1, 2])], "fold 0: row 1 is on both sides"),
        ([([0], [1]), ([0], [ROWS])], "fold 1: no row 103: rows are numbered 0 to 102"),
        ([([-1], [1])], "fold 0: no row -1"),
        ([([], [1])], "fold 0: it must give two non-empty lists of row numbers"),
        ([([1], [])], "fold 0: it must give two non-empty lists of row numbers"),
        ([([0.5], [1])], "fold 0: it must give two non-empty lists of row numbers"),
        ([([[0]], [1])], "fold 0: it must give two non-empty lists of row numbers"),
        ([([0], [1], [2])], "cannot split the data"),
        ([3], "cannot split the data"),
    ],
)
def test_invalid_rows_of_a_splitter_are_refused(data: Dataset, pairs: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make_folds(data, Splitter(*pairs))


def test_scikit_learns_splitters(data: Dataset) -> None:
    selection = pytest.importorskip("sklearn.model_selection")
    plain = make_folds(data, selection.KFold(4))
    assert sizes([plain.get_views(fold)[1] for fold in range(4)]) == [26, 26, 26, 25]
    stratified = KFold(selection.StratifiedKFold(3), stratify="kind").split(data)
    assert all(column(view, "kind").count(3) == 1 for _, view in stratified)
    both = selection.StratifiedGroupKFold(3)
    for train, view in KFold(both, stratify="kind", groups="group").split(data):
        assert not set(column(train, "group")) & set(column(view, "group"))
    with pytest.raises(InputError, match=r"if it needs them, give cerebro.KFold\(splitter\) strat"):
        make_folds(data, selection.StratifiedKFold(3))
    with pytest.raises(InputError, match=r"groups= \(a column of groups\)"):
        make_folds(data, selection.GroupKFold(3))


def test_folds_travel_and_share_the_data(data: Dataset) -> None:
    folds = make_folds(data, KFold(5, groups="group"))
    train, copy = pickle.loads(pickle.dumps((data, folds)))
    assert isinstance(copy, Folds)
    assert copy.data is train  # opened once
    assert copy.checksum == folds.checksum
    for fold in range(5):
        for view, twin in zip(folds.get_views(fold), copy.get_views(fold), strict=True):
            assert column(view, "n") == column(twin, "n")
            assert (
                view.view.loader_parts()[0][0] is data.view.loader_parts()[0][0]
            )  # the same mapping
            assert twin.view.loader_parts()[0][0] is train.view.loader_parts()[0][0]


def test_configurations_share_the_views(data: Dataset) -> None:
    """What a fold's rows take is there once, however many configurations there are."""
    folds = make_folds(data, KFold(3))
    assert all(folds.get_views(trial) is folds.get_views(trial % 3) for trial in range(3000))


def test_folds_of_another_dataset_are_refused(data: Dataset, tmp_path: Path) -> None:
    described = make_folds(data, KFold(3)).to_json()
    other = shard({"n": np.arange(20)}, tmp_path / "other", shards=2)
    with pytest.raises(InputError, match="its shards differ"):
        Folds.from_json(other, described)
    small = shard({"n": np.arange(20)}, tmp_path / "small", shards=SHARDS)
    with pytest.raises(InputError, match="the spec is damaged"):
        Folds.from_json(small, described)


def test_make_validation_accepts_five_kinds(data: Dataset) -> None:
    assert make_validation(data, None) == (data, None, None)
    assert make_validation(data, 0.25).folds is None
    assert make_validation(str(data.path), KFold(2)).folds is not None
    folds = make_folds(data, KFold(2))
    assert make_validation(data, folds).folds is folds
    with pytest.raises(InputError, match=r"a fraction between 0 and 1, a cerebro.KFold, or None"):
        make_validation(data, 5)


def test_repr_of_kfold() -> None:
    assert repr(cerebro.KFold(5)) == "KFold(5)"
    assert repr(KFold(3, stratify="y", seed=4)) == "KFold(3, stratify='y', seed=4)"


# --- the transforms of training and validation data ------------------------------------------

SCALED = {"real": [Scale(2), Normalize(0.5, 0.1)]}


@pytest.mark.parametrize(
    ("train", "held_out", "text"),
    [
        (SCALED, SCALED, ""),
        (SCALED, {"real": [Cast("float64"), *SCALED["real"]]}, ""),
        ({"square": [RandomCrop(1)]}, {}, ""),
        ({"ragged": [Pad(max_length=2)]}, {"ragged": [Pad(multiple_of=4)]}, ""),
        (SCALED, {}, "column 'real' has Scale and Normalize in training, but none here"),
        ({}, {"real": [Scale(2)]}, "column 'real' has no transform in training, but Scale here"),
        (
            {"real": [Scale(2)]},
            {"real": [Scale(3)]},
            "column 'real' has Scale in training, but other numbers here",
        ),
        (
            {"ragged": [Pad(-100)]},
            {},
            "column 'ragged' has Pad in training, but other numbers here",
        ),
    ],
)
def test_other_numbers_than_in_training_are_described(
    data: Dataset, train: Any, held_out: Any, text: str
) -> None:
    views = data.with_transforms(train), data.with_transforms(held_out)
    assert describe_other_numbers(*views, data.columns) == text
    assert describe_other_numbers(*views, ["n", "missing"]) == ""


def test_columns_stored_as_other_types_may_have_other_transforms(
    data: Dataset, tmp_path: Path
) -> None:
    ready = shard({"n": np.linspace(0, 1, 9)}, tmp_path / "ready", progress=False)
    assert describe_other_numbers(data.with_transforms({"n": [Scale(1 / ROWS)]}), ready, "n") == ""
