"""Runs as Optuna studies, Optuna's plots over both, and studies in storages that fail."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import subprocess
import sys
import warnings
from wsgiref.util import setup_testing_defaults

import numpy as np
import pytest
from test_optuna import EPOCHS, content, new_study, optimize

import cerebro
from cerebro.errors import InputError, RunError
from cerebro.integrations.optuna.terms import _widen_distribution, describe_storage
from cerebro.searchers import PBT, Hyperband

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.WARNING)
pytest.importorskip("sqlalchemy")

SPACE = {
    "lr": cerebro.loguniform(0.003, 0.5),
    "batch_size": [5, 10],
    "shape": [[1], [2, 3]],
    "kind": ["plain", "decayed"],
    "if decayed": cerebro.when("kind", "decayed", {"decay": cerebro.uniform(0.0, 0.1, step=0.05)}),
    "more": {"layers": cerebro.integer(1, 4), "start": cerebro.normal(0.0, 1.0), "constant": 7},
}
PLOTS = {
    "optimization_history", "intermediate_values", "param_importances", "parallel_coordinate",
    "contour", "slice", "edf", "rank", "timeline",
}  # fmt: skip


class LeastSquares:
    framework = "numpy"

    def __init__(self, config):
        if config["lr"] > 0.4:
            raise ValueError("too fast")
        self.w = np.full(3, config["more"]["start"] if "more" in config else 0.0)
        self.lr = config["lr"]

    def train_batch(self, batch):
        error = batch["x"] @ self.w - batch["y"]
        self.w = self.w - self.lr * (batch["x"].T @ error / len(error))
        return {"loss": float((error**2).mean()), "r2": -float((error**2).mean())}

    def eval_batch(self, batch):
        loss = float(((batch["x"] @ self.w - batch["y"]) ** 2).mean())
        return {"loss": loss, "r2": -loss}

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, state):
        self.w = np.array(state["w"])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 3))
    y = x @ np.array([1.0, -2.0, 0.5]) + 0.1 * rng.normal(size=240)
    return cerebro.shard({"x": x, "y": y}, tmp_path_factory.mktemp("data") / "set", shards=3)


def search(data, folder, **settings):
    options = {
        "epochs": EPOCHS, "n_trials": 24, "validation": 0.25, "workers": 0, "seed": 3,
        "searcher": Hyperband(1, 2), "space": SPACE, "progress": False,
    }  # fmt: skip
    options |= settings
    return cerebro.search(LeastSquares, options.pop("space"), data, run=folder, **options)


@pytest.fixture(scope="module")
def result(data, tmp_path_factory):
    points = [{"lr": 0.001}]  # below the space
    return search(data, tmp_path_factory.mktemp("runs") / "halved", points=points)


@pytest.mark.parametrize("stored", [False, True])
def test_a_result_converts_to_a_study(result, tmp_path, stored):
    storage = f"sqlite:///{tmp_path / 'study.db'}" if stored else None
    study = result.to_study(storage=storage)
    if stored:
        study = optuna.load_study(study_name="halved", storage=storage)
    assert study.direction.name == "MINIMIZE" and study.metric_names == ["loss"]
    assert study.user_attrs["cerebro"] == {"run": str(result.saved.folder), "seed": 3}
    assert len(study.trials) == len(result.trials) == 24
    states = {"finished": "COMPLETE", "stopped": "PRUNED", "failed": "FAIL", "diverged": "FAIL"}
    assert {trial.state.name for trial in study.trials} == {"COMPLETE", "PRUNED", "FAIL"}
    for theirs, ours in zip(study.trials, result.trials, strict=True):
        assert theirs.number == ours.number
        assert theirs.state.name == states[ours.status]
        assert theirs.value == ours.metrics.get("loss")
        losses = {epoch["epoch"]: epoch["metrics"]["loss"] for epoch in ours.history}
        assert theirs.intermediate_values == losses
        mark = theirs.user_attrs["cerebro"]
        assert (mark["trial"], mark["run"]) == (ours.number, str(result.saved.folder))
        assert mark.get("state_hash") == ours.state_hash and mark.get("error") == ours.error
        assert theirs.datetime_start <= theirs.datetime_complete
    complete = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    assert study.best_trial.number == min(complete, key=lambda trial: trial.value).number


@pytest.mark.parametrize(
    ("low", "value", "widened"),
    [(4, 2, (2, 64, True)), (4, 100, (4, 100, True)), (4, 0, (0, 64, False))],
)
def test_a_value_outside_widens_an_integers_bounds(low, value, widened):
    """Also on a logarithmic scale, unless the value has no logarithm."""
    kinds = optuna.distributions
    found = _widen_distribution(optuna, kinds.IntDistribution(4, 64, log=True), value)
    assert (found.low, found.high, found.log) == widened


def test_parameters_are_those_of_the_space(result):
    kinds = optuna.distributions
    expected = {
        "lr": kinds.FloatDistribution(0.001, 0.5, log=True),  # widened by the point, for all
        "batch_size": kinds.CategoricalDistribution([5, 10]),
        "shape": kinds.CategoricalDistribution(["[1]", "[2, 3]"]),
        "kind": kinds.CategoricalDistribution(["plain", "decayed"]),
        "decay": kinds.FloatDistribution(0.0, 0.1, step=0.05),
        "more.layers": kinds.IntDistribution(1, 4),
    }
    trials = result.to_study().trials
    assert trials[0].params["lr"] == 0.001
    for theirs, ours in zip(trials, result.trials, strict=True):
        decayed = ours.config["kind"] == "decayed"
        assert ("decay" in theirs.params) == decayed
        assert {*theirs.params, "decay"} == {*expected, "more.start"}
        start = theirs.distributions.pop("more.start")
        assert start.low <= theirs.params["more.start"] <= start.high
        assert theirs.distributions == {n: expected[n] for n in theirs.distributions}
        assert theirs.params["lr"] == ours.config["lr"]
        assert theirs.params["shape"] == str(ours.config["shape"])
        assert theirs.user_attrs["cerebro"]["config"] == ours.config


def test_a_point_without_a_logarithm_makes_the_scale_linear(data, tmp_path):
    """The scale is then linear, for all trials: a storage has one scale for a name."""
    space = {"lr": cerebro.loguniform(0.003, 0.3), "decay": cerebro.loguniform(1e-5, 1e-1)}
    result = search(
        *(data, tmp_path / "run"), space=space, batch_size=10, n_trials=4, epochs=1,
        searcher="random", points=[{"decay": 0.0}],
    )  # fmt: skip
    study = result.to_study(storage=f"sqlite:///{tmp_path / 'study.db'}")
    assert [trial.params for trial in study.trials] == [trial.config for trial in result.trials]
    decay = optuna.distributions.FloatDistribution(0.0, 0.1)
    assert all(trial.distributions["decay"] == decay for trial in study.trials)


def test_a_name_with_different_values_per_condition_is_split(data, tmp_path):
    space = {
        "lr": 0.01,
        "kind": ["a", "b"],
        "if a": cerebro.when(
            "kind",
            "a",
            {"width": [1, 2], "rate": cerebro.uniform(0, 1), "noise": cerebro.normal(0, 1)},
        ),
        "if b": cerebro.when(
            "kind",
            "b",
            {
                "width": [3, 4],
                "rate": cerebro.integer(3, 9, log=True),
                "noise": cerebro.integer(1, 3),
            },
        ),
    }
    result = search(
        *(data, tmp_path / "run"), space=space, batch_size=10, n_trials=8, epochs=1,
        searcher="random",
    )  # fmt: skip
    study = result.to_study(storage=f"sqlite:///{tmp_path / 'study.db'}")
    assert {trial.config["kind"] for trial in result.trials} == {"a", "b"}
    for theirs, ours in zip(study.trials, result.trials, strict=True):
        kind = ours.config["kind"]
        assert theirs.params == {
            "kind": kind,
            f"width if kind={kind}": ours.config["width"],
            f"rate if kind={kind}": ours.config["rate"],
            "noise": ours.config["noise"],
        }
        assert theirs.user_attrs["cerebro"]["config"] == ours.config


def test_a_study_that_cannot_be_made_leaves_nothing(result, tmp_path, monkeypatch):
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    add_trial = optuna.Study.add_trial

    def fail_later(study, trial):
        if len(study.trials) == 3:
            raise KeyboardInterrupt
        add_trial(study, trial)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(optuna.Study, "add_trial", fail_later)
        result.to_study(storage=storage)
    assert optuna.get_all_study_names(storage) == []
    assert len(result.to_study(storage=storage).trials) == 24


def test_r2_is_maximised_and_early_stopped_trials_are_complete(data, tmp_path):
    rule = cerebro.EarlyStopping("val_r2", patience=1, min_delta=0.01)
    result = search(data, tmp_path / "run", metric="r2", searcher="random", stop=rule, n_trials=9)
    study = result.to_study()
    assert study.direction.name == "MAXIMIZE"
    early = [trial for trial in result.trials if trial.status == "stopped"]
    assert early and all(study.trials[t.number].state.name == "COMPLETE" for t in early)
    assert study.best_trial.number == result.best.number
    assert study.best_value == result.best.metrics["r2"]


def test_clones_have_their_parents_on_record(data, tmp_path):
    space = {"lr": SPACE["lr"], "batch_size": 5}
    result = search(data, tmp_path / "run", searcher=PBT(1, 0.34), space=space, n_trials=6)
    study = result.to_study()
    clones = [trial for trial in result.trials if trial.parent is not None]
    assert clones
    for clone in clones:
        theirs = study.trials[clone.number]
        assert theirs.user_attrs["cerebro"]["parent"] == clone.parent
        assert min(theirs.intermediate_values) == clone.parent_epoch + 1


def test_study_values_are_means_over_folds(data, tmp_path):
    space = {"lr": cerebro.loguniform(0.003, 0.3)}
    result = search(
        *(data, tmp_path / "run"),
        searcher="random", space=space, batch_size=10, n_trials=3, validation=cerebro.KFold(2),
    )  # fmt: skip
    study = result.to_study()
    assert [trial.value for trial in study.trials] == [t.metrics["loss"] for t in result.trials]
    assert all(t.datetime_start < t.datetime_complete for t in study.trials)


def test_an_existing_study_of_the_same_name_is_refused(result, tmp_path):
    storage = f"sqlite:///{tmp_path / 'study.db'}"
    result.to_study(storage=storage)
    with pytest.raises(InputError, match="already has a study 'halved': choose another study_name"):
        result.to_study(storage=storage)
    again = result.to_study(storage=storage, study_name="again")
    assert content(again) == content(result.to_study())


def test_a_study_continues_from_a_search(data, tmp_path):
    space = {"lr": cerebro.loguniform(0.003, 0.4)}
    study = search(data, tmp_path / "run", space=space, batch_size=10).to_study()
    before = len(study.trials)
    study.sampler = optuna.samplers.TPESampler(seed=0, n_startup_trials=1)

    def build(trial):
        return LeastSquares({"lr": trial.suggest_float("lr", 0.003, 0.4, log=True)})

    optimize(study, data, build, n_trials=3, run=tmp_path / "further")
    assert len(study.trials) == before + 3
    assert all(trial.state.name == "COMPLETE" for trial in study.trials[before:])
    good = study.best_params["lr"]
    assert all(trial.params["lr"] > good / 10 for trial in study.trials[before:])  # it has learnt


def test_an_optimised_study_comes_back_from_its_result(data, tmp_path):
    study = new_study(optuna.pruners.PercentilePruner(30.0, n_startup_trials=2))
    result = optimize(study, data, n_trials=12, run=tmp_path / "run")
    again = result.to_study()
    assert [t.params for t in again.trials] == [t.params for t in study.trials]
    assert [t.state for t in again.trials] == [t.state for t in study.trials]
    assert [t.value for t in again.trials] == [t.value for t in study.trials]
    assert [t.intermediate_values for t in again.trials] == [
        t.intermediate_values for t in study.trials
    ]


# --- plots ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def studies(data, result, tmp_path_factory):
    study = new_study(optuna.pruners.PercentilePruner(30.0, n_startup_trials=2))
    optimize(study, data, n_trials=12, run=tmp_path_factory.mktemp("runs") / "run")
    assert {trial.state.name for trial in study.trials} == {"COMPLETE", "PRUNED"}
    return {"to_study": result.to_study(), "optimize": study}


@pytest.mark.parametrize("origin", ["to_study", "optimize"])
@pytest.mark.parametrize("name", sorted(PLOTS))
@pytest.mark.parametrize("library", ["matplotlib", "plotly"])
def test_optunas_plots_draw_the_study(studies, origin, name, library):
    pytest.importorskip("sklearn")  # of param_importances
    if library == "matplotlib":
        pytest.importorskip("matplotlib").use("Agg")
        draw = getattr(optuna.visualization.matplotlib, f"plot_{name}")
    else:
        pytest.importorskip("plotly")
        draw = getattr(optuna.visualization, f"plot_{name}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        figure = draw(studies[origin])
    if library == "matplotlib":
        axes = np.ravel(figure)
        drawn = [a.lines or a.collections or a.patches or a.containers for a in axes]
        assert all(drawn) or name == "contour"
        import matplotlib.pyplot as plt

        plt.close("all")
    else:
        assert figure.data


@pytest.mark.parametrize("origin", ["to_study", "optimize"])
def test_the_dashboard_shows_the_study(data, result, tmp_path, origin):
    """What its page asks for: the studies, and one of them with its trials and importances."""
    dashboard = pytest.importorskip("optuna_dashboard")
    storage = f"sqlite:///{tmp_path / 'studies.db'}"
    if origin == "to_study":
        study = result.to_study(storage=storage, study_name="pets")
    else:
        pruner = optuna.pruners.PercentilePruner(30.0, n_startup_trials=2)
        study = optuna.create_study(storage=storage, study_name="pets", pruner=pruner)
        optimize(study, data, n_trials=4, run=tmp_path / "run")
    app = dashboard.wsgi(storage)

    def get(path):
        status, environ = [], {}
        setup_testing_defaults(environ)
        environ["PATH_INFO"] = path
        body = b"".join(app(environ, lambda line, *_: status.append(line)))
        assert status == ["200 OK"], body
        return json.loads(body)

    (summary,) = get("/api/studies")["study_summaries"]
    assert summary["study_name"] == "pets"
    detail = get(f"/api/studies/{summary['study_id']}")
    assert len(detail["trials"]) == len(study.trials) > 3
    for shown, trial in zip(detail["trials"], study.trials, strict=True):
        assert shown["state"].upper()[:8] == trial.state.name.upper()[:8]
        values = {v["step"]: v["value"] for v in shown.get("intermediate_values", ())}
        assert values == trial.intermediate_values
        assert {p["name"] for p in shown["params"]} == set(trial.params)


# --- storages that fail -----------------------------------------------------------

LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


class Strikes:
    """Does something to the storage after the third epoch."""

    def __init__(self, strike):
        self.strike = strike
        self.epochs = 0

    def on_epoch_end(self, trial, metrics):
        self.epochs += 1
        if self.epochs == 3:
            self.strike()


def stored_study(file, **settings):
    storage = optuna.storages.RDBStorage(
        f"sqlite:///{file}", engine_kwargs={"connect_args": {"timeout": 0.2}}
    )
    return new_study(storage=storage, load_if_exists=True, **settings)


def no_worker_is_left():
    import psutil

    def words(child):
        try:
            return child.cmdline()
        except psutil.Error:
            return []

    children = psutil.Process().children(recursive=True)
    return not [child for child in children if "cerebro._worker" in words(child)]


def test_a_locked_storage_fails_the_run_which_can_resume(data, tmp_path):
    file = tmp_path / "study.db"
    holder = []

    def lock():
        process = subprocess.Popen(
            [sys.executable, "-c", LOCK, str(file)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        holder.append(process)
        assert process.stdout.readline() == "locked\n"

    run = tmp_path / "run"
    with pytest.raises(RunError) as raised:
        optimize(stored_study(file), data, run=run, run_callbacks=[Strikes(lock)], workers=2)
    text = str(raised.value)
    assert f"the storage of the study 'test' (sqlite:///{file}) fails: database is locked" in text
    assert "another process holds it" in text and f"the same call resumes the run {run}" in text
    assert "\n" not in text
    holder[0].communicate("")
    assert cerebro.open(run).status == "failed"
    optimize(stored_study(file), data, run=run)  # the same call
    study = stored_study(file)
    states = [trial.state.name for trial in study.trials]
    assert states.count("COMPLETE") == 8 and "RUNNING" not in states
    assert all(trial.datetime_complete is not None for trial in study.trials)


def test_a_storage_damaged_during_the_search_fails_the_run(data, tmp_path):
    file = tmp_path / "study.db"

    def damage():
        with open(file, "r+b") as target:  # noqa: PTH123
            target.write(b"no longer a database" * 400)

    with pytest.raises(RunError, match=r"study\.db\) fails: .*(not a database|malformed)"):
        optimize(stored_study(file), data, run=tmp_path / "run", run_callbacks=[Strikes(damage)])
    assert no_worker_is_left()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("garbage", "file is not a database: the file is damaged"),
        ("version", "no longer compatible with the table schema"),
        ("folder", "unable to open database file: its folder must exist and be writable"),
    ],
)
def test_an_unusable_storage_is_refused(result, tmp_path, what, message):
    file = tmp_path / "study.db"
    if what == "garbage":
        file.write_bytes(b"nothing of the kind" * 100)
    elif what == "version":
        result.to_study(storage=f"sqlite:///{file}", study_name="first")
        with contextlib.closing(sqlite3.connect(file)) as connection, connection:
            connection.execute("UPDATE alembic_version SET version_num = 'v9.9.9.x'")
            connection.execute("UPDATE version_info SET schema_version = 99")
    else:
        file = tmp_path / "nowhere" / "study.db"
    with pytest.raises(InputError, match="the storage of the study 'halved'") as raised:
        result.to_study(storage=f"sqlite:///{file}")
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_passwords_are_not_shown():
    url = "mysql+pymysql://me:secret@host:3306/studies"
    assert describe_storage(url) == "mysql+pymysql://me:***@host:3306/studies"


def test_a_study_with_another_direction_is_refused(data, tmp_path):
    optimize(new_study(), data, n_trials=2, run=tmp_path / "run")
    with (
        pytest.warns(UserWarning, match="'test' is to maximize loss"),
        pytest.raises(InputError, match="mode was 'min', is 'max'"),
    ):
        optimize(new_study(direction="maximize"), data, n_trials=4, run=tmp_path / "run")


def test_resume_refuses_a_study_without_the_runs_trials(data, tmp_path):
    with contextlib.suppress(KeyboardInterrupt):
        optimize(new_study(), data, run=tmp_path / "run", run_callbacks=[Strikes(interrupt)])
    with pytest.raises(
        InputError, match=r"does not have trial 0 of the run .*: give the run's study"
    ):
        optimize(new_study(), data, run=tmp_path / "run")


def interrupt():
    raise KeyboardInterrupt


def test_a_pruner_that_can_never_prune_is_reported(data, tmp_path):
    pruner = optuna.pruners.HyperbandPruner(min_resource=9, max_resource=3)
    with pytest.raises(InputError, match="max_resource=3 is below its min_resource=9"):
        optimize(new_study(pruner), data, run=tmp_path / "run")
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=9)
    with pytest.warns(UserWarning, match=f"min_resource=9 is above epochs={EPOCHS}"):
        optimize(new_study(pruner), data, n_trials=1, run=tmp_path / "run")


def test_a_result_reported_to_the_study_before_a_crash_is_not_repeated(data, tmp_path):
    """The process dies between the study's commit and the run's."""

    class Dies(Exception):
        pass

    def die(study, trial):
        if trial.number == 1:
            raise Dies  # after it was told, before that is on record

    pruner = optuna.pruners.PercentilePruner(30.0, n_startup_trials=2)
    undisturbed = new_study(pruner)
    optimize(undisturbed, data, n_trials=6, run=tmp_path / "undisturbed")
    study = new_study(pruner)
    with pytest.raises(Dies):
        optimize(study, data, n_trials=6, callbacks=[die], run=tmp_path / "run")
    told = {t.number for t in study.trials if t.state.name in ("COMPLETE", "PRUNED")}
    assert 1 in told
    optimize(study, data, n_trials=6, run=tmp_path / "run")
    done = [trial for trial in study.trials if trial.state.name in ("COMPLETE", "PRUNED")]
    assert len(done) == 6
    marks = sorted(trial.system_attrs["cerebro"]["trial"] for trial in done)
    assert marks == list(range(6))
