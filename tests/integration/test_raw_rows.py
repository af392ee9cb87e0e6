"""From raw rows to a prediction: in this process, and from a saved folder without Cerebro."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pd = pytest.importorskip("pandas")

from torch import nn  # noqa: E402

import cerebro  # noqa: E402
from cerebro import InputError  # noqa: E402
from cerebro.transforms import Cast, Normalize, Scale  # noqa: E402

COLUMNS = {"x": ["Age", "Fare", "Class", "Alone"], "sex": "Sex", "port": "Port", "y": "Survived"}


def passengers(rows: int = 80) -> Any:
    """Return a table with missing numbers and text, whose last rows have values seen nowhere."""
    rng = np.random.default_rng(0)
    age = rng.normal(30, 12, rows).round(1)
    age[::7] = np.nan
    port = rng.choice(["S", "C", "Q"], rows).astype(object)
    port[::9] = None
    return pd.DataFrame(
        {
            "Name": [f"passenger {row}" for row in range(rows)],
            "Age": age,
            "Fare": rng.gamma(2.0, 15.0, rows),
            "Class": rng.integers(1, 4, rows),
            "Alone": rng.random(rows) < 0.5,
            "Sex": rng.choice(["male", "female"], rows),
            "Port": port,
            "Survived": rng.choice(["no", "yes"], rows),
        }
    )


NEW = [
    {"Port": "X", "Sex": "male", "Age": None, "Fare": np.float32(7.5), "Class": 3, "Alone": True},
    {"Port": None, "Sex": "female", "Age": 4, "Fare": 80, "Class": np.int8(1), "Alone": False},
    {"Port": "Q", "Sex": "female", "Age": np.nan, "Fare": 1.25, "Class": 2, "Alone": np.True_},
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.sex, self.port = nn.Embedding(2, 3), nn.Embedding(5, 3)
        self.out = nn.Linear(10, 2)

    def forward(self, x: Any, sex: Any, port: Any) -> Any:
        return self.out(torch.cat([x, self.sex(sex), self.port(port)], 1))


def build(config: dict[str, Any]) -> Any:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])
    loss = nn.functional.cross_entropy
    return cerebro.torch.Model(net, optimizer=optimizer, loss=loss, inputs=["x", "sex", "port"])


def search(build: Any, data: Any, folder: Path, **options: Any) -> Any:
    given = {"epochs": 2, "batch_size": 16, "validation": 0.25, "n_trials": 1, "workers": 0}
    space = {"lr": cerebro.uniform(0.01, 0.02)}
    return cerebro.search(build, space, data, run=folder, progress=False, **{**given, **options})


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("passengers")
    data = cerebro.shard(
        passengers(), folder / "data", columns=COLUMNS, dtypes={"x": "float32"}, shards=2,
        missing="category", unknown=["Port"], progress=False,
    )  # fmt: skip
    data = data.with_transforms({"x": [Normalize((30, 30, 2, 0.5), (12, 20, 1, 3)), Scale(0.5)]})
    return search(build, data, folder / "run").best, folder


def by_hand(best: Any) -> Any:
    """Return the outputs for `NEW`, with everything written out."""
    age = float(np.nanmedian(passengers()["Age"]))
    x = np.array([[age, 7.5, 3, 1], [4, 80, 1, 0], [age, 1.25, 2, 1]], np.float32)
    mean, std = np.array([30, 30, 2, 0.5], np.float32), np.array([12, 20, 1, 3], np.float32)
    x = (x - mean) / std / np.float32(2)
    sex, port = torch.tensor([1, 0, 0]), torch.tensor([4, 3, 1])  # C Q S missing unknown
    with torch.no_grad():
        return best.load().net(torch.from_numpy(x), sex, port)


def test_raw_rows_are_predicted_as_by_hand(trained: tuple[Any, Path], tmp_path: Path) -> None:
    best, _ = trained
    data = best.saved.dataset("data")
    assert data.classes["port"] == ["C", "Q", "S", "missing", "unknown"]
    assert data.classes["sex"] == ["female", "male"]
    expected = by_hand(best)
    frame = pd.DataFrame(NEW)
    frame["Ticket"] = ["a", None, "b"]  # which the model does not read
    frame.to_csv(tmp_path / "new.csv", index=False)
    for rows in (NEW, tuple(NEW), frame, frame[sorted(frame)], tmp_path / "new.csv",
                 str(tmp_path / "new.csv"), frame.convert_dtypes(),
                 frame.astype({"Sex": "category"}),
                 frame.to_dict("list")):  # fmt: skip
        torch.testing.assert_close(best.predict(rows), expected, rtol=0, atol=0)
    torch.testing.assert_close(best.predict(NEW[1]), expected[1:2])
    shares = best.predict(NEW, output="probability")
    np.testing.assert_allclose(shares, torch.softmax(expected.double(), 1).numpy())
    names = np.array(["no", "yes"])[expected.argmax(1).numpy()]
    np.testing.assert_array_equal(best.predict(NEW, output="class"), names)
    # The whole table: as the dataset itself, whose rows are in another order.
    whole = cerebro.shard(
        passengers(), tmp_path / "again", columns=COLUMNS, dtypes={"x": "float32"}, shards=1,
        shuffle=False, missing="category", unknown=["Port"], progress=False,
    ).with_transforms(data.transforms or best.saved.view("data", None).transforms)  # fmt: skip
    torch.testing.assert_close(best.predict(passengers()), best.predict(whole), rtol=0, atol=0)


ELSEWHERE = """
import sys
sys.modules["cerebro"] = None
import json, runpy
import numpy as np
predict = runpy.run_path(sys.argv[1] + "/load.py")["predict"]
rows = json.loads(sys.argv[2])
answers = {out: predict(rows, output=out).tolist() for out in ("raw", "class", "probability")}
assert predict(sys.argv[3], output="class").tolist() == answers["class"]
assert "pandas" not in sys.modules
import pandas
assert predict(pandas.DataFrame(rows)).tolist() == answers["raw"]
assert predict(rows[0], output="class").tolist() == answers["class"][:1]
for wrong, text in (([{**rows[0], "Sex": "x"}], "'Sex' has 'x' in row 0"), ([{"Sex": "x"}], "Age")):
    try: predict(wrong)
    except ValueError as error: assert text in str(error), error
    else: raise AssertionError(text)
print(json.dumps(answers))
"""


def test_a_saved_folder_predicts_raw_rows_without_cerebro(
    trained: tuple[Any, Path], tmp_path: Path
) -> None:
    best, _ = trained
    best.save(tmp_path / "model")
    pd.DataFrame(NEW).to_csv(tmp_path / "new.csv", index=False)
    plain = json.loads(pd.DataFrame(NEW).to_json(orient="records"))
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(tmp_path / "model"), json.dumps(plain),
         str(tmp_path / "new.csv")],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for output in ("raw", "class", "probability"):
        assert found[output] == best.predict(NEW, output=output).tolist(), output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"Sex": "other"}, "column 'Sex' has 'other' in row 1, .* it has 'female', 'male'"),
        ({"Sex": None}, "column 'Sex' has a missing value in row 1"),
        ({"Sex": 3}, "column 'Sex' has 3 in row 1"),
        ({"Age": "old"}, "column 'Age' has 'old' in row 1, but numbers"),
        ({"Age": pd.Timestamp("2020-01-01")}, "column 'Age' has Timestamp.* in row 1"),
    ],
)
def test_a_wrong_value_is_named(trained: tuple[Any, Path], change: Any, message: str) -> None:
    rows = [NEW[0], {**NEW[1], **change}]
    with pytest.raises(InputError, match=message):
        trained[0].predict(rows)


def test_missing_columns_and_no_rows_are_refused(trained: tuple[Any, Path], tmp_path: Path) -> None:
    best, _ = trained
    frame = pd.DataFrame(NEW)
    with pytest.raises(InputError, match="the rows lack the column 'Fare': they have"):
        best.predict(frame.drop(columns="Fare"))
    with pytest.raises(InputError, match="row 1 lacks the column 'Port'"):
        best.predict([NEW[0], {k: v for k, v in NEW[1].items() if k != "Port"}])
    with pytest.raises(InputError, match="there are no rows"):
        best.predict(frame.iloc[:0])
    with pytest.raises(InputError, match="cannot read"):
        best.predict(tmp_path / "none.csv")
    with pytest.raises(InputError, match="output must be 'raw', 'class' or 'probability'"):
        best.predict(NEW, output="label")


def test_raw_rows_are_evaluated_and_validated_as_predicted(
    trained: tuple[Any, Path], tmp_path: Path
) -> None:
    best, _ = trained
    rows = passengers(24).drop(columns="Name")
    rows.loc[3, "Port"] = "elsewhere"  # no such name when trained, but it has a code
    outputs = torch.as_tensor(best.predict(rows))
    target = torch.tensor(rows["Survived"].eq("yes").to_numpy().astype(int))
    loss = float(nn.functional.cross_entropy(outputs, target))
    forms: list[Any] = [rows, rows.to_dict("records"), rows.to_dict("list")]
    if arrow := pytest.importorskip("pyarrow"):
        forms.append(arrow.Table.from_pandas(rows))
    for form in forms:
        assert best.evaluate(form)["loss"] == pytest.approx(loss, rel=1e-6)
    data = best.saved.dataset("data")
    again = search(build, data, tmp_path / "run", validation=rows, epochs=1).best
    assert again.evaluate(rows)["loss"] == pytest.approx(again.evaluate()["loss"], rel=1e-6)
    assert again.metrics["val_loss"] == again.evaluate()["loss"]
    rows.loc[5, "Sex"] = "other"
    with pytest.raises(InputError, match="column 'Sex' has 'other' in row 5"):
        best.evaluate(rows)


def test_raw_rows_are_not_taken_for_derived_columns(tmp_path: Path) -> None:
    frame = passengers()[["Fare", "Survived"]].rename(columns={"Fare": "x", "Survived": "y"})
    data = cerebro.shard(frame, tmp_path / "d", dtypes={"x": "float32"}, progress=False)
    derived = data.derive(tmp_path / "e", lambda batch: {"x": batch["x"] / 9}, keep=["y"],
                          progress=False)  # fmt: skip

    def linear(config: dict[str, Any]) -> Any:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.Linear(1, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])
        return cerebro.torch.Model(net, optimizer=optimizer, loss=nn.functional.cross_entropy)

    best = search(linear, derived, tmp_path / "run").best
    tables: list[Any] = [frame, frame.to_dict("records")]
    if arrow := pytest.importorskip("pyarrow"):
        tables.append(arrow.Table.from_pandas(frame))
    for rows in tables:
        for method in (best.predict, best.evaluate):
            with pytest.raises(InputError, match="were computed by derive or features"):
                method(rows)
    known = {name: np.concatenate([derived.shard(i)[name] for i in range(derived.num_shards)])
             for name in ("x", "y")}  # fmt: skip
    known["y"] = np.array(["no", "yes"])[known["y"]]
    assert best.evaluate(known) == best.evaluate(derived)
    kept = data.derive(tmp_path / "f", lambda batch: {"z": batch["x"] / 9}, keep=["x", "y"],
                       progress=False)  # fmt: skip
    best = search(linear, kept, tmp_path / "kept").best  # which reads x
    torch.testing.assert_close(
        best.predict(frame[["x"]]),
        best.predict(frame["x"].to_numpy().astype("float32")), rtol=0, atol=0,
    )  # fmt: skip


def test_columns_and_numbers_are_not_lost(tmp_path: Path) -> None:
    (tmp_path / "twice.csv").write_text("a,b,a\n1,2,3\n")
    number = 2**53 + 1
    for wrong, text in (
        (tmp_path / "twice.csv", "two columns named 'a': rename one"),
        ([{"a": 1}, {"a": 2, "b": 3}], "row 1 has the column 'b', which row 0 lacks"),
        ({"a": [number, None]}, f"column 'a' has {number} in row 0, which float64 cannot hold"),
        ({"a": [number, 0.5]}, f"column 'a' has {number} in row 0, which float64 cannot hold"),
        ({"a": [None, 1], "y": [1, None]}, "column 'y' is the target, and is missing in row 1"),
        ({"a": [None, 1], "label": ["u", None]}, "column 'label' is the target, and is missing"),
    ):
        with pytest.raises(InputError, match=text):
            cerebro.shard(wrong, tmp_path / "d", missing="category", progress=False)
    rows = {"n": [number, 1], "a": ["u", None], "b": ["no", "yes"]}
    data = cerebro.shard(
        rows, tmp_path / "d", columns={"n": "n", "a": "a", "y": "b"}, shards=1, shuffle=False,
        missing="fill", unknown="category", progress=False,
    )  # fmt: skip
    assert data.shard(0)["n"].tolist() == [number, 1]
    assert data.classes["a"] == ["u", "unknown"] and data.classes["y"] == ["no", "yes"]


def test_arrays_by_column_are_inputs_unless_they_may_be_rows(
    trained: tuple[Any, Path], tmp_path: Path
) -> None:
    import runpy

    best, _ = trained
    predict = runpy.run_path(str(best.save(tmp_path / "model") / "load.py"))["predict"]
    x = np.array([[0.5, 0.25, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]], np.float32)
    sex, port = np.array([1, 0]), np.array([4, 3])
    arrays = {"sex": sex, "port": port, "x": x}  # x has transforms, and port a code for new names
    for function, error in ((best.predict, InputError), (predict, ValueError)):
        with pytest.raises(error, match="may be rows before or after 'x' was made of them"):
            function(arrays)
    inputs = {name: torch.as_tensor(array) for name, array in arrays.items()}
    torch.testing.assert_close(predict(x, sex, port), best.load().predict(inputs), rtol=0, atol=0)
    for rows, message in (
        ([], "there are no rows: give at least one"),
        ("new.parquet", "'new.parquet' is not a .csv or .tsv file: read it as a frame"),
    ):
        with pytest.raises(ValueError, match=message):
            predict(rows)
    row = pd.DataFrame(NEW).iloc[1]
    torch.testing.assert_close(predict(row), best.predict(row), rtol=0, atol=0)
    arrow = pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match="Arrow table: give a frame"):
        predict(arrow.Table.from_pylist([{"Sex": "male"}]))
    plain = cerebro.shard({"x": x, "y": np.array([0, 1])}, tmp_path / "d", progress=False)

    best = search(linear, plain, tmp_path / "run", validation=None, batch_size=2).best
    predict = runpy.run_path(str(best.save(tmp_path / "plain") / "load.py"))["predict"]
    torch.testing.assert_close(best.predict({"x": x}), best.predict(x), rtol=0, atol=0)
    torch.testing.assert_close(predict({"x": x}), best.predict(x), rtol=0, atol=0)
    with pytest.raises(ValueError, match="the arrays lack the column 'x'"):
        predict({"z": x})


def test_columns_of_arrays_may_be_rows_before_their_transforms(tmp_path: Path) -> None:
    """`shard` got a mapping of arrays, and `predict` must not take it for scaled inputs."""
    import runpy

    rng = np.random.default_rng(0)
    rows = {"x": rng.uniform(0, 255, (40, 4)).astype("f4"), "y": rng.integers(0, 2, 40)}
    data = cerebro.shard(rows, tmp_path / "d", progress=False)
    data = data.with_transforms({"x": [Scale(1 / 255)]})
    best = search(linear, data, tmp_path / "run").best
    scaled = rows["x"] / np.float32(255)
    with torch.no_grad():
        expected = best.load().net(torch.from_numpy(scaled))
    predict = runpy.run_path(str(best.save(tmp_path / "model") / "load.py"))["predict"]
    for function in (best.predict, predict):
        with pytest.raises(ValueError, match="may be rows before or after 'x' was made of them"):
            function(rows)
    for bare in (rows["x"], torch.as_tensor(scaled)):  # nothing says whether they are scaled
        with pytest.raises(InputError, match=r"for the model's own inputs, load\(\)\.predict"):
            best.predict(bare)
    for found in (
        best.load().predict(scaled),
        predict(scaled),
        best.predict((rows["x"], rows["y"])),
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_dataset_without_the_transforms_of_training_is_noticed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = {"x": rng.uniform(0, 255, (40, 4)).astype("f4"), "y": rng.integers(0, 2, 40)}
    data = cerebro.shard(rows, tmp_path / "d", progress=False)
    scaled = data.with_transforms({"x": [Scale(1 / 255)]})
    text = "column 'x' has Scale in training, but none here"
    with pytest.warns(UserWarning, match=f"validation: {text}: give it the training data's"):
        best = search(linear, scaled, tmp_path / "run", validation=data.select(range(10))).best
    for function in (best.evaluate, best.predict):
        with pytest.warns(UserWarning, match=text):
            function(data)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            function(scaled)


def linear(config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])
    return cerebro.torch.Model(net, optimizer=optimizer, loss=nn.functional.cross_entropy)


def test_inputs_of_any_numeric_type_are_predicted_as_evaluated(tmp_path: Path) -> None:
    x = np.random.default_rng(0).integers(0, 5, (40, 4))
    best = search(linear, (x.astype("f4"), np.arange(40) % 2), tmp_path / "run").best
    expected = best.predict(x.astype("f4"))
    for given in (x, x.astype("f8"), x.astype(">f8"), x.astype("f2"), torch.tensor(x), x.tolist(),
                  torch.tensor(x).double(), {"x": x.tolist()}, {"x": torch.tensor(x)}):  # fmt: skip
        torch.testing.assert_close(best.predict(given), expected, rtol=0, atol=0)
    with pytest.raises(InputError, match="the rows differ in length: give them as"):
        best.predict([[1, 2], [3]])
    with pytest.raises(InputError, match="the rows of 'x' differ in length"):
        best.predict({"x": [[1, 2], [3]]})
    with pytest.raises(InputError, match=r"shape \(4,\), .* rows of shape \(4\): .* array\[None\]"):
        best.predict(x[0])


class Own:
    """A model with four methods and a `predict`, which does not say what it reads."""

    framework = "numpy"

    def train_batch(self, batch: Any) -> dict[str, float]:
        return {"loss": float(batch["x"].mean())}

    eval_batch = train_batch

    def predict(self, data: Any) -> Any:
        assert data.dtype == np.float32
        return data.sum(1)

    def state_dict(self) -> dict[str, Any]:
        return {"w": np.ones(1)}

    def load_state_dict(self, state: Any) -> None:
        pass


def test_arrays_for_a_model_that_does_not_say_what_it_reads(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 4)).astype("f4")
    data = cerebro.shard({"x": x, "y": np.arange(40) % 2}, tmp_path / "d", progress=False)
    best = search(lambda config: Own(), data, tmp_path / "run").best
    np.testing.assert_array_equal(best.predict(x.astype("f8")), x.sum(1))
    scaled = data.with_transforms({"x": [Scale(0.5)]})
    best = search(lambda config: Own(), scaled, tmp_path / "scaled").best
    with pytest.raises(InputError, match="may be rows before or after 'x' was made of them"):
        best.predict(x)


def test_integers_get_the_type_of_their_column(tmp_path: Path) -> None:
    def build(config: dict[str, Any]) -> Any:
        torch.manual_seed(0)
        net = nn.Embedding(9, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])
        return cerebro.torch.Model(net, optimizer=optimizer, loss=nn.functional.cross_entropy)

    codes = np.arange(40) % 9
    best = search(build, (codes, np.arange(40) % 2), tmp_path / "run").best
    expected = best.predict(codes)
    for given in (codes.astype("u1"), codes.astype(">i8"), torch.tensor(codes).short(),
                  pd.Series(codes), {"x": codes.tolist()}):  # fmt: skip
        torch.testing.assert_close(best.predict(given), expected, rtol=0, atol=0)


def test_lists_of_sequences_are_padded_as_in_training(tmp_path: Path) -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.words, self.out = nn.Embedding(20, 4), nn.Linear(4, 2)

        def forward(self, t: Any, t_mask: Any) -> Any:
            return self.out((self.words(t) * t_mask[..., None]).sum(1))

    def build(config: dict[str, Any]) -> Any:
        net = Mean()
        optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])
        loss = nn.functional.cross_entropy
        return cerebro.torch.Model(net, optimizer=optimizer, loss=loss, inputs=["t", "t_mask"])

    words = [[1], [2, 3], [4, 5, 6], [7, 8], [9], [1, 2, 3, 4]] * 4
    best = search(build, {"t": words, "y": [0, 1] * 12}, tmp_path / "run").best
    expected = best.predict([{"t": sentence} for sentence in words])
    torch.testing.assert_close(best.predict({"t": words}), expected, rtol=0, atol=0)
    same_length = {"t": [[1, 2], [3, 4]]}
    assert best.predict(same_length).shape == (2, 2)
    torch.testing.assert_close(best.predict({"t": [4, 5, 6]}), expected[2:3], rtol=0, atol=0)
    # Padded, with a mask: the model's own inputs.
    padded = {"t": [[1, 7], [2, 3]], "t_mask": [[True, False], [True, True]]}
    torch.testing.assert_close(best.predict(padded), expected[:2])
    with pytest.raises(InputError, match="'t_mask', which is made of 't': leave it out"):
        best.predict([{"t": [1, 7], "t_mask": [True, False]}])


@pytest.mark.parametrize("wrap", [np.asarray, torch.as_tensor, list])
def test_dictionaries_of_arrays_are_rows_or_batches_by_their_dimensions(
    wrap: Any, tmp_path: Path
) -> None:
    x = np.random.default_rng(0).normal(size=(40, 4)).astype("f4")
    best = search(linear, [{"x": v, "y": i % 2} for i, v in enumerate(x)], tmp_path / "run").best
    expected = best.predict(x)
    rows = [{"x": wrap(vector), "y": 0} for vector in x[:3]]
    torch.testing.assert_close(best.predict(rows), expected[:3], rtol=0, atol=0)
    batches = [{"x": torch.as_tensor(x[:16])}, {"x": torch.as_tensor(x[16:])}]
    torch.testing.assert_close(best.predict(batches), expected)
    for vector in (wrap(x[0]), x[0].tolist()):  # one row
        torch.testing.assert_close(best.predict({"x": vector}), expected[:1], rtol=0, atol=0)


def test_a_target_that_nobody_reads_may_hold_anything(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 4)).astype("f4")
    rows = pd.DataFrame({"x": list(x), "y": ["no", "yes"] * 20})
    best = search(linear, rows, tmp_path / "run").best
    expected = best.predict(rows[["x"]])
    for target in ([-1] * 40, [None] * 40, ["perhaps"] * 40):
        torch.testing.assert_close(best.predict(rows.assign(y=target)), expected, rtol=0, atol=0)
    whole = torch.utils.data.TensorDataset(torch.as_tensor(x), torch.zeros(40, dtype=torch.long))
    for pair in ((x, np.zeros(40, int)), whole):
        torch.testing.assert_close(best.predict(pair), expected, rtol=0, atol=0)
    with pytest.raises(InputError, match="column 'y' has numbers, but names in the training data"):
        best.evaluate(rows.assign(y=[0, 1] * 20))


def test_a_column_may_be_in_a_stack_and_by_itself(tmp_path: Path) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(3, 2)

        def forward(self, x: Any, a: Any) -> Any:
            return self.out(torch.cat([x, a[:, None]], 1))

    def build(config: dict[str, Any]) -> Any:
        net = Both()
        optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])
        loss = nn.functional.cross_entropy
        return cerebro.torch.Model(net, optimizer=optimizer, loss=loss, inputs=["x", "a"])

    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"a": rng.normal(size=40), "b": rng.normal(size=40), "y": [0, 1] * 20})
    frame = frame.astype({"a": "float32", "b": "float32"})
    columns = {"x": ["a", "b"], "a": "a", "y": "y"}
    data = cerebro.shard(frame, tmp_path / "d", columns=columns, progress=False)
    best = search(build, data, tmp_path / "run", validation=frame).best
    assert best.evaluate(frame)["loss"] == best.metrics["val_loss"]
    for stack, message in (
        (["a", "a", "b"], "columns stacks 'a' twice: name it once"),
        ([["a"], ["b"]], r"columns: \['a'\] is not a column name"),
    ):
        with pytest.raises(InputError, match=message):
            cerebro.shard(frame, tmp_path / "e", columns={"x": stack}, progress=False)


def test_numbers_that_no_type_holds_do_not_become_text(tmp_path: Path) -> None:
    cells = ["12345678901234567", "", "5.5", *["3", "20", "100"] * 6]
    path = tmp_path / "big.csv"
    path.write_text("x,y\n" + "".join(f"{cell},{row % 2}\n" for row, cell in enumerate(cells)))
    with pytest.raises(InputError, match="12345678901234567 in row 0, which float64 cannot hold"):
        cerebro.shard(path, tmp_path / "d", missing="median", progress=False)
    for name, cells, way in (
        ("a", [1.0, np.inf, np.nan], "mean"),
        ("b", ["missing", None], "category"),
    ):
        with pytest.raises(InputError, match=f"missing: column '{name}' has .* give "):
            cerebro.shard({name: cells}, tmp_path / "d", missing=way, progress=False)
    frame = pd.DataFrame({"x": np.arange(40), "y": [0, 1] * 20, "z": 0.0})
    data = cerebro.shard(frame, tmp_path / "e", columns={"x": ["x", "z"], "y": "y"}, progress=False)
    best = search(
        lambda config: cerebro.sklearn.Model(_naive_bayes()), data, tmp_path / "run"
    ).best  # fmt: skip
    for moment in (np.datetime64("2020-01-01", "ns"), np.timedelta64(1, "ns")):
        with pytest.raises(InputError, match="in row 0, but numbers in the training data"):
            best.predict([{"x": moment, "z": 0.0}])


def _naive_bayes() -> Any:
    pytest.importorskip("sklearn")
    from sklearn.naive_bayes import GaussianNB

    return GaussianNB()


def test_mixed_forms_of_rows_are_refused(trained: tuple[Any, Path], tmp_path: Path) -> None:
    best, _ = trained
    row = {**NEW[1], "Age": [4.0, 5.0]}
    with pytest.raises(InputError, match="column 'Port' is one value, and others are lists"):
        best.predict(row)
    frame = pd.DataFrame(NEW)
    torch.testing.assert_close(
        best.predict({name: frame[name] for name in frame}), best.predict(frame), rtol=0, atol=0
    )
    torch.testing.assert_close(best.predict(frame.iloc[1]), best.predict([NEW[1]]), rtol=0, atol=0)
    for text in ('Age,Port\n1,"S\n2,Q\n', "Age,Port\n1,\xe9"):
        (tmp_path / "bad.csv").write_bytes(text.encode("latin-1"))
        with pytest.raises(InputError, match="cannot be read after line"):
            best.predict(tmp_path / "bad.csv")
        with pytest.raises(InputError, match="cannot be read after line"):
            cerebro.shard(tmp_path / "bad.csv", tmp_path / "d", missing="fill", progress=False)


def test_columns_that_nobody_reads_may_hold_anything(
    trained: tuple[Any, Path], tmp_path: Path
) -> None:
    best, _ = trained
    rows = passengers(24)
    plain = best.evaluate(rows.drop(columns="Name"))
    odd = rows.assign(
        Cabin=[None, "C1"] * 12, when=pd.Timestamp("2026-01-01"), pixels=[[1, 2]] * 24
    )
    assert best.evaluate(odd) == plain
    assert best.evaluate(odd.to_dict("records")) == plain
    torch.testing.assert_close(best.predict(odd), best.predict(rows), rtol=0, atol=0)
    again = search(build, best.saved.dataset("data"), tmp_path / "run", validation=odd).best
    assert again.evaluate(odd)["loss"] == pytest.approx(again.metrics["val_loss"], rel=1e-6)


def test_columns_whose_names_are_numbers_may_hold_anything(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(40, 4)).astype("f4")
    rows = pd.DataFrame({"x": list(x), "y": [0, 1] * 20})
    best = search(linear, rows, tmp_path / "run").best
    assert best.evaluate(rows.assign(a=0).rename(columns={"a": 7})) == best.evaluate(rows)
    torch.testing.assert_close(best.predict({"x": x, 7: x}), best.predict(x), rtol=0, atol=0)
    with pytest.raises(InputError):  # a row of a frame has no rows to evaluate
        best.evaluate(rows.iloc[0])


def test_made_columns_have_the_types_of_the_training_data(tmp_path: Path) -> None:
    frame = passengers()[["Fare", "Survived"]]
    data = cerebro.shard(
        frame, tmp_path / "d", columns={"x": ["Fare"], "y": "Survived"}, dtypes={"x": "bfloat16"},
        shards=1, shuffle=False, progress=False,
    )  # fmt: skip

    def linear(config: dict[str, Any]) -> Any:
        torch.manual_seed(0)
        net = nn.Linear(1, 2).bfloat16()
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-4 * config["lr"])
        return cerebro.torch.Model(net, optimizer=optimizer, loss=nn.functional.cross_entropy)

    best = search(linear, data, tmp_path / "run").best
    assert best.evaluate(frame) == best.evaluate(data)
    assert set(best.predict(frame, output="class")) <= {"no", "yes"}


def test_fill_values_are_computed_and_recorded(tmp_path: Path) -> None:
    frame = pd.DataFrame(
        {
            "a": [1.0, np.nan, 2.0, 9.0],
            "n": pd.array([1, None, 2, 2], "Int64"),
            "t": ["u", None, "v", "v"],
            "c": pd.Categorical(["lo", "hi", None, "lo"], ["lo", "mid", "hi"], ordered=True),
        }
    )

    def made(missing: Any, **options: Any) -> Any:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        data = cerebro.shard(
            frame, folder, missing=missing, shards=1, shuffle=False, progress=False, **options
        )
        return {name: array.tolist() for name, array in data.shard(0).items()}, data

    rows, data = made("fill")
    assert rows == {"a": [1, 2, 2, 9], "n": [1, 2, 2, 2], "t": [0, 1, 1, 1], "c": [0, 2, 0, 0]}
    assert data.classes["c"] == ["lo", "mid", "hi"]
    rows, data = made("mean")
    assert rows["a"] == [1, 4, 2, 9] and rows["t"] == [0, 2, 1, 1]
    assert data.classes["c"] == ["lo", "mid", "hi", "missing"]
    rows, data = made({"a": 0, "n": "median", "t": "none", "c": "category"}, unknown="category")
    assert rows["a"] == [1, 0, 2, 9]
    assert data.classes["t"] == ["u", "v", "none", "unknown"]
    sources = {made["name"]: made["sources"][0] for made in data.shards.manifest.recipe}
    assert sources["a"]["fill"] == 0 and sources["n"]["fill"] == 2
    assert sources["t"]["fill"] == "none" and sources["t"]["unknown"] == 3
    with pytest.raises(InputError, match="'t' has a missing value in row 1"):
        made({"a": 0})
    with pytest.raises(InputError, match="'zero' cannot fill"):
        made({"a": "zero"})
    with pytest.raises(InputError, match="missing has the unknown column 'b'"):
        made({"b": 0})
    with pytest.raises(InputError, match="missing is 'most'"):
        made("most")
    with pytest.raises(InputError, match="unknown is 'yes'"):
        made("fill", unknown="yes")
    with pytest.raises(InputError, match="do not take"):
        cerebro.shard((np.zeros(3), np.zeros(3)), tmp_path / "pair", missing="fill")


def test_a_table_and_its_csv_file_are_filled_alike(tmp_path: Path) -> None:
    passengers().to_csv(tmp_path / "p.csv", index=False)
    options: Any = {"columns": COLUMNS, "missing": "category", "unknown": "category",
                    "progress": False}  # fmt: skip
    table = cerebro.shard(passengers(), tmp_path / "a", **options)
    assert cerebro.shard(tmp_path / "p.csv", tmp_path / "b", **options).checksum == table.checksum
    again = cerebro.shard(passengers(), tmp_path / "a", exist_ok=True, **options)
    assert again.checksum == table.checksum
    with pytest.raises(InputError, match="was made with missing='category', not 'fill'"):
        cerebro.shard(passengers(), tmp_path / "a", **{**options, "missing": "fill"})


def test_rows_given_to_search_and_regression(tmp_path: Path) -> None:
    frame = passengers()[["Fare", "Class", "Alone"]].assign(y=np.arange(80.0))

    def regress(config: dict[str, Any]) -> Any:
        torch.manual_seed(0)
        net = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
        loss = lambda output, y: ((output[:, 0] - y) ** 2).mean()  # noqa: E731
        return cerebro.torch.Model(net, optimizer=optimizer, loss=loss, inputs="x", target="y")

    data = cerebro.shard(frame, tmp_path / "d", columns={"x": ["Fare"], "y": "y"},
                         dtypes={"x": "float32", "y": "float32"}, progress=False)  # fmt: skip
    best = search(regress, data, tmp_path / "run", validation=cerebro.KFold(2)).best
    with pytest.raises(InputError, match="has 2 folds, each with its own model"):
        best.predict([{"Fare": 2}])
    fold = best.folds[1]
    net = fold.load().net
    with torch.no_grad():
        expected = net(torch.tensor([[2.0], [5.0]]))
    torch.testing.assert_close(fold.predict([{"Fare": 2}, {"Fare": 5.0}]), expected)
    with pytest.raises(InputError, match="the loss does not tell how outputs become classes"):
        fold.predict([{"Fare": 2}], output="class")


def test_one_output_is_the_share_of_the_second_class(tmp_path: Path) -> None:
    def binary(config: dict[str, Any]) -> Any:
        torch.manual_seed(0)
        net = nn.Linear(1, 1)

        def loss(output: Any, y: Any) -> Any:
            return nn.functional.binary_cross_entropy_with_logits(output[:, 0], y.float())

        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        return cerebro.torch.Model(net, optimizer=optimizer, loss=loss)

    frame = passengers().assign(y=lambda table: (table["Fare"] > 25).astype(int))
    data = cerebro.shard(frame, tmp_path / "d", columns={"x": ["Fare"], "y": "y"},
                         dtypes={"x": "float32"}, progress=False)  # fmt: skip
    data = data.with_transforms({"x": [Scale(1 / 50), Cast("float64"), Cast("float32")]})
    best = search(binary, data, tmp_path / "run").best
    rows = [{"Fare": 1.0}, {"Fare": 90.0}]
    share = torch.sigmoid(best.predict(rows).double())[:, 0].numpy()
    np.testing.assert_allclose(best.predict(rows, output="probability")[:, 1], share)
    assert best.predict(rows, output="class").tolist() == (share > 0.5).astype(int).tolist()


@pytest.mark.parametrize("is_pipeline", [False, True])
def test_an_estimator_predicts_raw_rows(is_pipeline: bool, tmp_path: Path) -> None:
    linear = pytest.importorskip("sklearn.linear_model")

    def fit(config: dict[str, Any]) -> Any:
        made: Any = linear.SGDClassifier(loss="log_loss", random_state=0)
        if is_pipeline:
            from sklearn.pipeline import make_pipeline
            from sklearn.preprocessing import StandardScaler

            made = make_pipeline(StandardScaler(), made)
        return cerebro.sklearn.Model(made, inputs=["x", "sex"])

    data = cerebro.shard(passengers(), tmp_path / "d", columns=COLUMNS, missing="category",
                         progress=False)  # fmt: skip
    best = search(fit, data, tmp_path / "run").best
    rows = passengers().drop(columns="Survived").head(5)
    classes = best.predict(rows, output="class")
    shares = best.predict(rows, output="probability")
    assert set(classes) <= {"no", "yes"} and shares.shape == (5, 2)
    np.testing.assert_array_equal(np.array(["no", "yes"])[shares.argmax(1)], classes)
    best.save(tmp_path / "model")
    rows.to_csv(tmp_path / "rows.csv", index=False)
    program = (
        "import sys, json, runpy; sys.modules['cerebro'] = None\n"
        "predict = runpy.run_path(sys.argv[1] + '/load.py')['predict']\n"
        "print(json.dumps([predict(sys.argv[2], output=o).tolist() for o in "
        "('class', 'probability')]))\n"
    )
    arguments = [str(tmp_path / "model"), str(tmp_path / "rows.csv")]
    done = subprocess.check_output([sys.executable, "-c", program, *arguments], text=True)
    assert json.loads(done) == [classes.tolist(), shares.tolist()]


def test_cells_of_text_do_not_make_numbers_categories(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("a,b\n" + "".join(f"{row},{row % 2}\n" for row in range(9)) + "nan,1\n,0\n")
    data = cerebro.shard(file, tmp_path / "a", missing="median", shards=1, shuffle=False,
                         progress=False)  # fmt: skip
    assert data.classes["a"] is None and data.shard(0)["a"].tolist() == [*range(9), 4, 4]
    file.write_text(file.read_text() + "?,1\n")
    with pytest.raises(InputError, match="column 'a' holds numbers, but '\\?' in row 11"):
        cerebro.shard(file, tmp_path / "b", missing="median", progress=False)


def train_on(loss: Any, outputs: int, target: Any, folder: Path, **net: Any) -> Any:
    """Return a trained model of `outputs` outputs, and the rows that it was trained on."""

    def fit(config: dict[str, Any]) -> Any:
        torch.manual_seed(0)
        layers = [nn.Linear(2, outputs), *net.values()]
        made = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(made.parameters(), lr=config["lr"])
        return cerebro.torch.Model(made, optimizer=optimizer, loss=loss)

    x = np.random.default_rng(1).normal(size=(40, 2)).astype(np.float32)
    data = cerebro.shard({"x": x, "y": target}, folder / "d", progress=False)
    return search(fit, data, folder / "run").best, x


F = nn.functional
CLASSES = np.arange(40) % 3
SOFTMAX, LOG = nn.Softmax(dim=1), nn.LogSoftmax(dim=1)


class Sharp(nn.CrossEntropyLoss):
    def forward(self, output: Any, target: Any) -> Any:
        return super().forward(output * 3, target)


@pytest.mark.parametrize(
    ("loss", "net", "known"),
    [
        (F.cross_entropy, {}, True),
        (nn.CrossEntropyLoss(label_smoothing=0.1), {}, True),
        (lambda output, y: F.cross_entropy(output, y.long()), {}, True),
        (lambda output, y: F.nll_loss(F.log_softmax(output, 1), y), {}, True),
        (lambda output, y: F.nll_loss(output, y), {"log": LOG}, True),
        (lambda output, y: F.cross_entropy(output / 2, y), {}, False),
        (lambda output, y: F.nll_loss(torch.log(output), y), {"soft": SOFTMAX}, False),
        (Sharp(), {}, False),
        (lambda output, y: F.cross_entropy(output, y) + 0.1 * output.std(), {}, True),
        (lambda output, y: F.cross_entropy(output, y, torch.tensor([1.0, 2, 3])), {}, True),
        (lambda output, y: F.cross_entropy(output, y, label_smoothing=0.2), {}, True),
        (lambda output, y: F.cross_entropy(output, y, reduction="sum"), {}, True),
        (lambda output, y: F.multi_margin_loss(output, y), {}, False),
    ],
)  # fmt: skip
def test_probabilities_are_those_of_the_loss_or_refused(
    loss: Any, net: Any, known: bool, tmp_path: Path
) -> None:
    best, x = train_on(loss, 3, CLASSES, tmp_path, **net)
    raw = torch.as_tensor(best.predict(x)).double()
    assert best.predict(x, output="class").tolist() == raw.argmax(1).tolist()
    if known:
        share = best.predict(x, output="probability")
        np.testing.assert_allclose(share, torch.softmax(raw, 1).numpy(), rtol=1e-6)
    else:
        with pytest.raises(InputError, match="the loss does not tell"):
            best.predict(x, output="probability")


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
def test_several_labels_in_a_row(dtype: Any, tmp_path: Path) -> None:
    labels = (np.arange(120).reshape(40, 3) % 2).astype(dtype)
    loss = lambda output, y: F.binary_cross_entropy_with_logits(output, y.float())  # noqa: E731
    best, x = train_on(loss, 3, labels, tmp_path)
    share = torch.sigmoid(torch.as_tensor(best.predict(x)).double()).numpy()
    np.testing.assert_allclose(best.predict(x, output="probability"), share)
    assert best.predict(x, output="class").tolist() == (share > 0.5).astype(int).tolist()


def test_a_second_sigmoid_is_not_applied(tmp_path: Path) -> None:
    def loss(output: Any, y: Any) -> Any:
        return F.binary_cross_entropy(torch.sigmoid(output[:, 0]), y.float())

    def twice(output: Any, y: Any) -> Any:
        return F.binary_cross_entropy_with_logits(torch.sigmoid(output[:, 0]), y.float())

    def one_of_many(output: Any, y: Any) -> Any:
        return F.binary_cross_entropy_with_logits(output[:, 0], (y > 0.5).float())

    (tmp_path / "many").mkdir()
    best, x = train_on(one_of_many, 1, CLASSES, tmp_path / "many")
    with pytest.raises(InputError, match="the loss does not tell"):
        best.predict(x, output="class")
    for name, function in (("once", loss), ("twice", twice)):
        (tmp_path / name).mkdir()
        best, x = train_on(function, 1, CLASSES % 2, tmp_path / name)
        if name == "twice":
            with pytest.raises(InputError, match="the loss does not tell"):
                best.predict(x, output="class")
            continue
        share = torch.sigmoid(torch.as_tensor(best.predict(x)).double())[:, 0].numpy()
        np.testing.assert_allclose(best.predict(x, output="probability")[:, 1], share, rtol=1e-6)


def test_outputs_that_are_no_probabilities_are_refused() -> None:
    from cerebro.data import recipe

    target = {"classes": None, "kind": "i", "activation": "none"}
    with pytest.raises(recipe.RowsError, match="not finite in row 1"):
        recipe.decode(np.array([0.5, np.nan]), "class", target)
    for wrong in (np.array([0.5, -0.1]), np.array([0.5, 1.5])):
        with pytest.raises(recipe.RowsError, match="not probabilities"):
            recipe.decode(wrong, "probability", target)
    with pytest.raises(recipe.RowsError, match="3 outputs, but the loss is that of a single one"):
        recipe.decode(np.full((2, 3), 0.5), "probability", {**target, "activation": "sigmoid"})
    with pytest.raises(recipe.RowsError, match=r"needs a model that names one target"):
        recipe.decode(np.zeros((2, 3)), "class", None)


@pytest.mark.parametrize(
    ("loss", "width"),
    [
        (lambda output, y: F.cross_entropy(output.abs(), y), 3),
        (lambda output, y: F.cross_entropy(F.relu(output), y), 3),
        (lambda output, y: F.cross_entropy(output.clamp(-1, 1), y), 3),
        (lambda output, y: F.cross_entropy(-output, y), 3),
        (lambda output, y: F.cross_entropy(output.neg_(), y), 3),
        (lambda output, y: F.cross_entropy(output, (y + 1) % 3), 3),
        (lambda output, y: F.cross_entropy(output, 2 - y), 3),
        (lambda output, y: F.cross_entropy(output[:, :3], y), 5),
        (lambda output, y: F.cross_entropy(output, y) + F.nll_loss(output, y), 3),
        (lambda output, y: F.binary_cross_entropy_with_logits(output[:, 0], (y == 1).float()), 1),
        (lambda output, y: F.binary_cross_entropy_with_logits(output[:, 0].abs(), y.float()), 1),
    ],
)
def test_losses_of_changed_outputs_or_targets_tell_nothing(loss: Any, width: int) -> None:
    from cerebro.data.manifest import Column
    from cerebro.torch.loss_calls import find_activation

    for classes in (("a", "b", "c"), None):
        assert find_activation(loss, (width,), Column("y", "int64", classes=classes)) is None


@pytest.mark.parametrize(
    ("loss", "shape", "column", "expected"),
    [
        (lambda o, y: F.cross_entropy(o, y), (4, 5, 6), ("int64", (5, 6)), "softmax"),
        (lambda o, y: F.cross_entropy(o.transpose(1, 2), y), (5, 4), ("int64", (5,)), None),
        (lambda o, y: F.cross_entropy(o, y.argmax(1)), (3,), ("int64", (3,)), "softmax"),
        (lambda o, y: F.cross_entropy(o, y.float()), (3,), ("int64", (3,)), "softmax"),
        (lambda o, y: F.binary_cross_entropy_with_logits(o, y), (1, 8, 8), ("float32", (1, 8, 8)),
         "sigmoid"),
        (lambda o, y: F.binary_cross_entropy_with_logits(o[:, 0], y, pos_weight=torch.tensor(2.0)),
         (1,), ("float32", ()), "sigmoid"),
        (lambda o, y: F.binary_cross_entropy_with_logits(o, y), (), ("float32", ()), "sigmoid"),
        (lambda o, y: F.binary_cross_entropy(torch.sigmoid(o).squeeze(1), y.float()), (1,),
         ("int64", ()), "sigmoid"),
        (lambda o, y: F.nll_loss(o.log_softmax(-1), y), (3,), ("int64", ()), "softmax"),
        (lambda o, y: F.nll_loss(o.log_softmax(0), y), (3,), ("int64", ()), None),
        (nn.CrossEntropyLoss(), (3,), ("int64", ()), "softmax"),
        (nn.NLLLoss(), (3,), ("int64", ()), "exp"),
        (nn.BCELoss(), (), ("float32", ()), "none"),
        (nn.MSELoss(), (), ("float32", ()), None),
    ],
)  # fmt: skip
def test_a_loss_tells_what_makes_probabilities(
    loss: Any, shape: Any, column: Any, expected: Any
) -> None:
    from cerebro.data.manifest import Column
    from cerebro.torch.loss_calls import find_activation

    assert find_activation(loss, shape, Column("y", *column)) == expected


def test_classes_are_the_largest_outputs_only_if_the_loss_says_so(tmp_path: Path) -> None:
    def focal(output: Any, y: Any) -> Any:
        share = torch.softmax(output, 1).gather(1, y[:, None])
        return (-((1 - share) ** 2) * torch.log(share)).mean()

    def distances(output: Any, y: Any) -> Any:
        return F.cross_entropy(-output, y)

    for loss in (focal, distances):
        folder = tmp_path / loss.__name__
        folder.mkdir()
        best, x = train_on(loss, 3, CLASSES, folder)
        if loss is focal:
            raw = torch.as_tensor(best.predict(x))
            assert best.predict(x, output="class").tolist() == raw.argmax(1).tolist()
        else:
            with pytest.raises(InputError, match="does not tell how outputs become classes"):
                best.predict(x, output="class")
        with pytest.raises(InputError, match="does not tell how outputs become probabilities"):
            best.predict(x, output="probability")


def lightning_base() -> Any:
    """Return a LightningModule of one layer, without its training step."""
    lightning = pytest.importorskip("lightning")

    class Base(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.out = nn.Linear(2, 2)

        def validation_step(self, batch: Any) -> None:
            self.log("loss", self.training_step(batch))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Base


def test_a_lightning_module_with_several_inputs_predicts_raw_rows(tmp_path: Path) -> None:
    class Module(lightning_base()):  # type: ignore[misc]
        def forward(self, first: Any, second: Any) -> Any:
            return self.out(torch.stack([first, second], 1))

        def training_step(self, batch: Any) -> Any:
            return F.cross_entropy(self(batch["a"], batch["b"]), batch["y"])

    class Predicting(Module):
        def predict_step(self, batch: Any) -> Any:
            return self(batch["a"], batch["b"])

    frame = pd.DataFrame({"a": [1.0, np.nan] * 20, "b": np.arange(40.0), "y": [0, 1] * 20})
    frame = frame.astype({"a": "float32", "b": "float32"})
    data = cerebro.shard(frame, tmp_path / "d", missing={"a": "median"}, progress=False)
    best = search(lambda config: Predicting(), data, tmp_path / "run").best
    net = best.load().net
    filled = torch.as_tensor(frame[["a", "b"]].fillna(1.0).to_numpy()[:4])
    with torch.no_grad():
        expected = net(filled[:, 0], filled[:, 1])
    rows = frame.drop(columns="y").head(4)
    torch.testing.assert_close(best.predict(rows), expected, rtol=0, atol=0)
    with pytest.raises(InputError, match="needs a model that names one target"):
        best.predict(rows, output="class")
    with pytest.warns(UserWarning, match="has only the weights, .* does not tell which"):
        best.save(tmp_path / "model")
    assert (tmp_path / "model" / "weights.safetensors").exists()
    best = search(lambda config: Module(), data, tmp_path / "other").best
    with pytest.raises(InputError, match=r"forward\(first, second\) does not tell which of"):
        best.predict(rows)


class Shares(cerebro.torch.Model):
    def predict_batch(self, batch: Any) -> Any:
        return torch.softmax(super().predict_batch(batch), 1)


def test_a_saved_model_tells_that_it_does_not_predict_as_the_users_method(tmp_path: Path) -> None:
    def build(config: dict[str, Any]) -> Any:
        net = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])
        return Shares(net, optimizer=optimizer, loss=nn.functional.cross_entropy)

    x = np.random.default_rng(0).normal(size=(40, 4)).astype("f4")
    best = search(build, (x, np.arange(40) % 2), tmp_path / "run").best
    with pytest.warns(UserWarning, match="the network's outputs, not those of predict_batch"):
        best.save(tmp_path / "model")


def test_a_saved_lightning_module_tells_that_it_has_forward_only(tmp_path: Path) -> None:
    import runpy

    class Module(lightning_base()):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            return self.out(x)

        def training_step(self, batch: Any) -> Any:
            x, y = batch
            return F.cross_entropy(self(x), y)

        def predict_step(self, batch: Any) -> Any:
            return torch.softmax(self(batch[0]), 1)

    frame = pd.DataFrame({"a": np.arange(40.0), "b": np.ones(40), "y": [0, 1] * 20})
    data = cerebro.shard(
        frame, tmp_path / "d", columns={"x": ["a", "b"], "y": "y"}, dtypes={"x": "float32"},
        progress=False,
    )  # fmt: skip
    best = search(lambda config: Module(), data, tmp_path / "run").best
    with pytest.warns(UserWarning, match="the network's outputs, not those of predict_step"):
        best.save(tmp_path / "model")
    predict = runpy.run_path(str(tmp_path / "model" / "load.py"))["predict"]
    shares = torch.softmax(predict(frame.head(4)), 1)
    torch.testing.assert_close(shares, best.predict(frame.head(4)))
    with pytest.raises(InputError, match="does not say which column it reads: give a mapping"):
        best.predict(frame[["a", "b"]].to_numpy("f4"))
