"""From raw rows to a prediction: in this process, and from a saved folder without Cerebro."""

from __future__ import annotations

import json
import subprocess
import sys
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


def test_an_estimator_predicts_raw_rows(tmp_path: Path) -> None:
    linear = pytest.importorskip("sklearn.linear_model")

    def fit(config: dict[str, Any]) -> Any:
        made = linear.SGDClassifier(loss="log_loss", random_state=0)
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
