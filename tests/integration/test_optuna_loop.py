"""What `Study.optimize` does with a study's trials, `cerebro.optuna.optimize` does too."""

from __future__ import annotations

import builtins
import contextlib
import sqlite3
import time
import warnings

import numpy as np
import pytest
from test_optuna import EPOCHS, LeastSquares, new_study, optimize
from test_optuna import data as data  # a fixture

import cerebro
from cerebro.errors import InputError, RunError

optuna = pytest.importorskip("optuna")

WORKERS = pytest.mark.parametrize("workers", [0, 2])


def states(study):
    return [trial.state.name for trial in study.trials]


class Constant(LeastSquares):
    """Does not learn; its validation loss is what it was made with."""

    def __init__(self, loss):
        super().__init__(0.0)
        self.loss = loss

    def train_batch(self, batch):
        return {"loss": 1.0}

    def eval_batch(self, batch):
        return {"loss": self.loss}


class Raises(LeastSquares):
    """Raises while it trains."""

    def __init__(self, error):
        super().__init__(0.1)
        self.error = error

    def train_batch(self, batch):
        raise self.error


class Base(Exception):
    pass


class Sub(Base):
    pass


class Mine(ValueError):
    pass


class TimeoutError(Exception):
    """Not Python's."""


PYTHONS = builtins.TimeoutError


class Interrupting:
    """Ctrl-C after so many epochs."""

    def __init__(self, epochs):
        self.left = epochs

    def on_epoch_end(self, trial, metrics):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


# --- trials that wait in the study --------------------------------------------------


def build_x(trial):
    x = trial.suggest_float("x", 0.0, 1.0)
    return Constant(x)


@pytest.mark.parametrize("stored", [False, True])
def test_an_interruption_leaves_enqueued_trials_where_they_are(data, tmp_path, stored):
    pytest.importorskip("sqlalchemy")
    storage = f"sqlite:///{tmp_path / 'study.db'}" if stored else None
    study = new_study(storage=storage)
    for number in range(6):
        study.enqueue_trial({"x": number / 10}, user_attrs={"memo": number})
    options = {"n_trials": 6, "width": 2, "run": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        optimize(study, data, build_x, run_callbacks=[Interrupting(3)], **options)
    assert states(study) == ["FAIL", "FAIL", *["WAITING"] * 4]
    if stored:
        study = new_study(storage=storage, load_if_exists=True)
    result = optimize(study, data, build_x, **options)
    assert states(study) == ["FAIL", "FAIL", *["COMPLETE"] * 6]
    done = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    assert sorted(trial.params["x"] for trial in done) == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    for trial in done:
        mine = result.trials[trial.system_attrs["cerebro"]["trial"]]
        assert trial.value == trial.params["x"] == mine.config["x"] == mine.metrics["loss"]
        assert trial.user_attrs == {"memo": round(10 * trial.params["x"])}
        assert list(trial.intermediate_values) == list(range(EPOCHS))


def test_resumed_trials_never_wait_in_the_queue(data, tmp_path, monkeypatch):
    """Another process that asks the same study cannot be given it."""
    study = new_study()
    options = {"n_trials": 2, "width": 2, "run": tmp_path / "run"}
    with pytest.raises(KeyboardInterrupt):
        optimize(study, data, build_x, run_callbacks=[Interrupting(3)], **options)
    made = []
    create = study._storage.create_new_trial

    def note(study_id, template_trial=None):
        made.append(None if template_trial is None else template_trial.state.name)
        return create(study_id, template_trial)

    monkeypatch.setattr(study._storage, "create_new_trial", note)
    optimize(study, data, build_x, **options)
    assert made == ["RUNNING", "RUNNING"]


# --- stop() --------------------------------------------------------------------------


def grid_study(sampler, pruner=None):
    return optuna.create_study(sampler=sampler, pruner=pruner or optuna.pruners.NopPruner())


GRID = {"x": [0.1, 0.2], "y": [1, 2]}


def build_grid(trial):
    x = trial.suggest_categorical("x", GRID["x"])
    return Constant(x + trial.suggest_categorical("y", GRID["y"]))


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("kind", ["grid", "brute force", "grid under Hyperband"])
def test_a_grid_ends_when_all_of_it_is_tried(data, tmp_path, kind, width):
    pruner = optuna.pruners.HyperbandPruner(1, EPOCHS) if "Hyperband" in kind else None
    if kind == "brute force":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = optuna.samplers.BruteForceSampler(seed=0)
    else:
        sampler = optuna.samplers.GridSampler(GRID, seed=0)
    for n_trials in (4, None):
        study = grid_study(sampler, pruner)
        run = tmp_path / f"run-{n_trials}"
        result = optimize(study, data, build_grid, n_trials=n_trials, width=width, run=run)
        assert result.status == "finished"
        tried = {(trial.params["x"], trial.params["y"]) for trial in study.trials}
        assert len(tried) == 4 and set(states(study)) <= {"COMPLETE", "PRUNED"}
        assert len(study.trials) <= 4 + (n_trials is None) * (width - 1)  # those in flight


@WORKERS
def test_build_and_callbacks_stop_the_study(data, tmp_path, workers):
    def build(trial):
        if trial.number == 2:
            trial.study.stop()
        return build_x(trial)

    study = new_study()
    options = {"n_trials": 9, "width": 1, "workers": workers}
    assert optimize(study, data, build, run=tmp_path / "build", **options).status == "finished"
    assert states(study) == ["COMPLETE"] * 3
    seen = []

    def callback(given, trial):
        assert isinstance(given, optuna.Study) and given is study
        seen.append(trial.number)
        if len(seen) == 2:
            given.stop()

    study = new_study()
    optimize(study, data, build_x, callbacks=[callback], run=tmp_path / "callback", **options)
    assert states(study) == ["COMPLETE"] * 2 and seen == [0, 1]
    with pytest.raises(RuntimeError, match="inside an objective function or a callback"):
        study.stop()


def test_a_study_is_not_optimised_within_itself(data, tmp_path):
    study = new_study()

    def nested(trial):
        optimize(study, data, build_x, n_trials=1)

    with pytest.raises(InputError, match="inside a trial, which cannot start a run"):
        optimize(study, data, nested, run=tmp_path / "run")
    assert states(study) == ["FAIL"]


def test_a_storage_with_a_heartbeat_causes_no_warning(data, tmp_path, recwarn):
    pytest.importorskip("sqlalchemy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        url = f"sqlite:///{tmp_path / 'study.db'}"
        storage = optuna.storages.RDBStorage(url, heartbeat_interval=60)
    study = new_study(storage=storage)
    optimize(study, data, build_x, n_trials=2, run=tmp_path / "run")
    assert states(study) == ["COMPLETE"] * 2
    assert not [warning for warning in recwarn if "eartbeat" in str(warning.message)]


@pytest.mark.parametrize("catch", [(), Mine])
@pytest.mark.parametrize("where", ["build", "training"])
def test_callbacks_are_not_called_for_a_failure_that_ends_the_study(data, tmp_path, where, catch):
    def build(trial):
        trial.suggest_float("x", 0.0, 1.0)
        if trial.number == 0:
            return Constant(0.5)
        if where == "build":
            raise Mine("bad")
        return Raises(Mine("bad"))

    study, seen = new_study(), []
    ending = contextlib.nullcontext() if catch else pytest.raises((Mine, RunError), match="bad")
    with ending:
        optimize(
            *(study, data, build),
            n_trials=2, width=1, catch=catch, run=tmp_path / "run",
            callbacks=[lambda _, trial: seen.append(trial.number)],
        )  # fmt: skip
    assert states(study) == ["COMPLETE", "FAIL"]
    assert seen == ([0, 1] if catch else [0])


# --- what trials raise --------------------------------------------------------------


@WORKERS
@pytest.mark.parametrize(
    ("raised", "catch", "caught"),
    [
        (Sub, Base, True),
        (Base, Sub, False),
        (Mine, ValueError, True),
        (np.linalg.LinAlgError, ValueError, True),
        (PYTHONS, TimeoutError, False),
        (TimeoutError, PYTHONS, False),
        (PYTHONS, OSError, True),
        (SystemExit, Exception, False),
    ],
)
def test_catch_also_matches_base_classes_of_the_error(
    data, tmp_path, workers, raised, catch, caught
):
    def build(trial):
        trial.suggest_float("x", 0.0, 1.0)
        return Raises(raised("bad")) if trial.number == 1 else Constant(0.5)

    study = new_study()
    options = {"n_trials": 3, "width": 1, "workers": workers, "catch": catch}
    ending = (
        contextlib.nullcontext()
        if caught
        else pytest.raises(RunError, match=rf"trial 1 failed: {raised.__name__}: bad \(test_optuna")
    )
    with ending:
        optimize(study, data, build, run=tmp_path / "run", **options)
    assert states(study) == (["COMPLETE", "FAIL", "COMPLETE"] if caught else ["COMPLETE", "FAIL"])


def test_first_trials_that_fail_alike_may_be_caught(data, tmp_path):
    def build(trial):
        trial.suggest_float("x", 0.0, 1.0)
        return Raises(Mine("bad")) if trial.number < 4 else Constant(0.5)

    study = new_study()
    optimize(study, data, build, n_trials=6, catch=Mine, run=tmp_path / "run")
    assert states(study) == ["FAIL"] * 4 + ["COMPLETE"] * 2
    with pytest.raises(RunError, match="all three trials failed; the first: Mine: bad"):
        optimize(new_study(), data, build, n_trials=3, catch=Mine, run=tmp_path / "none")


def test_the_error_gives_both_numbers_of_the_failed_trial(data, tmp_path):
    study = new_study()
    study.tell(study.ask(), state=optuna.trial.TrialState.FAIL)
    both = r"trial 1 of the study, 0 of the run, failed: Mine: bad \(test_optuna_loop\.py"
    with pytest.raises(RunError, match=both):
        optimize(study, data, lambda trial: Raises(Mine("bad")), define=build_x, run=tmp_path / "r")


def test_torch_out_of_memory_is_caught_as_a_runtime_error(data, tmp_path):
    torch = pytest.importorskip("torch")

    def build(trial):
        trial.suggest_float("x", 0.0, 1.0)
        error = torch.OutOfMemoryError("CUDA out of memory")
        return Raises(error) if trial.number == 1 else Constant(0.5)

    study = new_study()
    optimize(study, data, build, n_trials=3, workers=1, catch=RuntimeError, run=tmp_path / "run")
    assert states(study) == ["COMPLETE", "FAIL", "COMPLETE"]


@WORKERS
@pytest.mark.parametrize("where", ["training", "build"])
def test_a_trial_prunes_itself(data, tmp_path, workers, where):
    """All of them do: that they end alike is no failure of the run."""

    def define(trial):
        trial.suggest_float("x", 0.0, 1.0)

    def build(trial):
        define(trial)
        if where == "build":
            raise optuna.TrialPruned("too large")
        return Raises(optuna.TrialPruned("bad"))

    study = new_study()
    seen = []
    result = optimize(
        *(study, data, build),
        define=define, n_trials=4, workers=workers, run=tmp_path / "run",
        callbacks=[lambda _, trial: seen.append(trial.state.name)],
    )  # fmt: skip
    assert states(study) == seen == ["PRUNED"] * 4
    assert result.status == "finished"
    assert [trial.status for trial in result.trials] == ["stopped"] * 4
    assert all("TrialPruned" in trial.error for trial in result.trials)


def test_pruning_one_fold_prunes_all_folds(data, tmp_path):
    class PrunesIn(Constant):
        def __init__(self, fold):
            super().__init__(0.5)
            self.fold = fold

        def end_epoch(self, epoch, metrics):
            if self.fold == 1 and epoch == 1:
                raise optuna.TrialPruned("bad")

    def build(trial, info):
        trial.suggest_float("x", 0.0, 1.0)
        return PrunesIn(info.fold)

    study = new_study()
    result = optimize(
        study, data, build, n_trials=3, validation=cerebro.KFold(3), run=tmp_path / "run"
    )
    assert states(study) == ["PRUNED"] * 3
    for trial in result.trials:
        assert trial.status == "stopped" and "in fold 1" in trial.error
        assert [fold.status for fold in trial.folds] == ["stopped"] * 3


def test_after_a_crash_no_fold_of_a_pruned_trial_trains_on(data, tmp_path):
    """The process dies when one fold's end is on record and those of the others are not."""

    class Dies(Exception):
        pass

    class Die:
        def on_trial_end(self, trial):
            raise Dies

    class PrunesIn(Constant):
        def end_epoch(self, epoch, metrics):
            if self.loss == 1 and epoch == 1:
                raise optuna.TrialPruned("bad")

    def build(trial, info):
        trial.suggest_float("x", 0.0, 1.0)
        return PrunesIn(info.fold)

    study = new_study()
    run = tmp_path / "run"
    options = {"n_trials": 1, "validation": cerebro.KFold(3), "run": run}
    with pytest.raises(Dies):
        optimize(study, data, build, run_callbacks=[Die()], **options)
    with contextlib.closing(sqlite3.connect(run / "run.sqlite")) as connection, connection:
        connection.execute("UPDATE trials SET resumable = 1 WHERE number != 1")
    result = optimize(study, data, build, **options)
    assert states(study) == ["FAIL", "PRUNED"]
    assert [fold.status for fold in result.trials[0].folds] == ["stopped"] * 3
    assert {fold.epoch for fold in result.trials[0].folds} <= {1, 2}
    assert result.status == "finished"


def test_resume_reports_a_self_pruned_trial_to_the_study(data, tmp_path):
    """The process dies between the run's record and the study's."""

    class Dies(Exception):
        pass

    class Die:
        def on_trial_end(self, trial):
            if trial.number == 1:
                raise Dies

    def build(trial):
        trial.suggest_float("x", 0.0, 1.0)
        return Raises(optuna.TrialPruned("bad")) if trial.number == 1 else Constant(0.5)

    study = new_study()
    options = {"n_trials": 3, "width": 1, "run": tmp_path / "run"}
    with pytest.raises(Dies):
        optimize(study, data, build, run_callbacks=[Die()], **options)
    assert states(study) == ["COMPLETE", "FAIL"]
    result = optimize(study, data, build, **options)
    assert states(study) == ["COMPLETE", "FAIL", "PRUNED", "COMPLETE"]
    assert [trial.status for trial in result.trials] == ["finished", "stopped", "finished"]


# --- what a trial is in workers ------------------------------------------------------


@WORKERS
def test_workers_and_later_loads_see_the_trials_number_and_attributes(data, tmp_path, workers):
    study = new_study()
    for _ in range(3):  # trials 0 to 2 belong to an earlier search
        study.tell(study.ask(), state=optuna.trial.TrialState.FAIL)
    study.enqueue_trial({"x": 0.25}, user_attrs={"memo": "warm"})

    def define(trial):
        trial.suggest_float("x", 0.0, 1.0)
        if trial.number == 4:
            raise optuna.TrialPruned
        trial.set_user_attr("defined", trial.number)

    def build(trial):
        trial.suggest_float("x", 0.0, 1.0)
        assert trial.user_attrs["defined"] == trial.number
        assert (trial.number == 3) == (trial.user_attrs.get("memo") == "warm")
        assert (trial.number == 3) == ("fixed_params" in trial.system_attrs)
        assert trial.study.study_name == "test"
        assert trial.study.direction == optuna.study.StudyDirection.MINIMIZE
        return Constant(float(trial.number))

    run = tmp_path / "run"
    result = optimize(study, data, build, define=define, n_trials=4, workers=workers, run=run)
    values = {trial.number: trial.value for trial in study.trials[3:]}
    assert values == {3: 3.0, 4: None, 5: 5.0, 6: 6.0}
    assert [set(trial.config) for trial in result.trials] == [{"x"}] * 3
    for trial in cerebro.open(run, build=build).trials:  # after reopening the run
        assert trial.load().loss == trial.metrics["loss"]
        assert cerebro.replay(run, trial.number, build).identical


def test_reading_study_trials_in_a_worker_is_refused(data, tmp_path):
    def build(trial):
        return Constant(len(trial.study.trials))

    def define(trial):
        trial.suggest_float("x", 0.0, 1.0)

    with pytest.raises(RunError, match=r"trial\.study\.trials is not available in a worker"):
        optimize(new_study(), data, build, define=define, run=tmp_path / "run")


def test_attributes_that_cannot_be_recorded_stay_in_the_study(data, tmp_path):
    def build(trial):
        trial.set_user_attr("array", np.zeros(3))
        trial.set_user_attr("size", 3)
        return build_x(trial)

    study = new_study()
    result = optimize(study, data, build, n_trials=2, run=tmp_path / "run")
    assert result.status == "finished"
    assert all(trial.user_attrs.keys() == {"array", "size"} for trial in study.trials)


@WORKERS
def test_tuples_are_choices(data, tmp_path, workers):
    choices = [(1, 2), (3, (4,)), [5, (6,)]]

    def build(trial):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Optuna, that a storage may not keep them
            k = trial.suggest_categorical("k", choices)
        assert k in choices
        return Constant(float(choices.index(k)))

    study = new_study()
    with pytest.raises(KeyboardInterrupt):
        optimize(
            study, data, build, n_trials=8, workers=workers, run=tmp_path / "run",
            run_callbacks=[Interrupting(5)],
        )  # fmt: skip
    result = optimize(study, data, build, n_trials=8, workers=workers, run=tmp_path / "run")
    assert result.status == "finished"
    for trial in study.trials:
        if trial.state.name == "COMPLETE":
            mine = result.trials[trial.system_attrs["cerebro"]["trial"]]
            assert mine.config == trial.params and mine.config["k"] in choices
    assert result.best.config["k"] == study.best_params["k"] == (1, 2)


# --- time, numbers and arguments -------------------------------------------------------


def test_a_timeout_lets_trials_finish(data, tmp_path, monkeypatch):
    class Passing:
        """The time is over in the second epoch of the first trials."""

        def __init__(self):
            self.now = 0.0

        def on_epoch_end(self, trial, metrics):
            if trial.epoch == 2:
                self.now = 100.0

    clock = Passing()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    study = new_study()
    options = {"n_trials": 5, "timeout": 60, "run": tmp_path / "run", "run_callbacks": [clock]}
    result = optimize(study, data, build_x, **options)
    assert states(study) == ["COMPLETE"] * 3  # as many as are live at a time
    assert result.status == "stopped"
    clock.now = 0.0
    result = optimize(study, data, build_x, **{**options, "run_callbacks": []})  # a minute more
    assert states(study) == ["COMPLETE"] * 5
    assert result.status == "finished"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("pruned", [False, True])
def test_non_finite_metrics_are_handled_as_by_optuna(data, tmp_path, value, pruned):
    """As in Optuna's own loop."""

    def define(trial):
        trial.suggest_float("x", 0.0, 1.0)
        return value if trial.number == 3 else 0.5

    def objective(trial):
        loss = define(trial)
        for epoch in range(EPOCHS):
            trial.report(loss, epoch)
            if epoch + 1 < EPOCHS and trial.should_prune():
                raise optuna.TrialPruned
        return loss

    def build(trial):
        return Constant(define(trial))

    def pruner():
        return optuna.pruners.MedianPruner(n_startup_trials=2) if pruned else None

    theirs = new_study(pruner())
    theirs.optimize(objective, n_trials=5)
    ours = new_study(pruner())
    optimize(ours, data, build, n_trials=5, width=1, run=tmp_path / "run")
    assert states(ours) == states(theirs)
    assert [trial.value for trial in ours.trials] == [trial.value for trial in theirs.trials]
    expected = {"nan": "FAIL", "inf": "COMPLETE", "-inf": "COMPLETE"}[str(value)]
    assert states(ours)[3] == ("PRUNED" if pruned and value != float("-inf") else expected)


@pytest.mark.parametrize("name", ["n_jobs", "show_progress_bar", "gc_after_trial", "mode"])
def test_unsupported_arguments_of_study_optimize_are_refused(data, tmp_path, name):
    study = new_study()
    with pytest.raises(TypeError, match=rf"cerebro\.optuna\.optimize\(\) .*\b{name}="):
        optimize(study, data, run=tmp_path / "run", **{name: 1})
    assert not study.trials
