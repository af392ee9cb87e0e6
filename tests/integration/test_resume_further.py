"""Runs that are trained further, by the same script, with other data folders, or not at all."""

from __future__ import annotations

import functools
import importlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading

import numpy as np
import pytest
import resumable
from resumable import EPOCHS, SHARDS, UNITS, Strike, build_some_fail, hashes, search, struck

import cerebro
import cerebro.cli as cli
from cerebro.errors import InputError

CLI = [sys.executable, "-m", "cerebro"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    x = np.random.default_rng(0).normal(size=(230, 3))
    folder = tmp_path_factory.mktemp("data") / "set"
    cerebro.shard({"x": x, "y": x.sum(1)}, folder, shards=SHARDS, progress=False)
    return folder


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    return search(tmp_path_factory.mktemp("runs") / "whole", data)


@pytest.fixture(scope="module")
def longer(data, tmp_path_factory):
    """The same with two epochs more, undisturbed."""
    return search(tmp_path_factory.mktemp("runs") / "longer", data, epochs=EPOCHS + 2)


@pytest.fixture
def finished(whole, tmp_path):
    """A finished run of one's own."""
    shutil.copytree(whole.path, tmp_path / "run")
    return tmp_path / "run"


class Builder:
    def __init__(self, function):
        self.function = function

    def __call__(self, config, info):
        return self.function(config, info)


def stop(folder, data, at=23, **options):
    struck(folder, data, at=at, number=signal.SIGTERM, **options)
    return cerebro.open(folder)


def events(folder, kind):
    connection = sqlite3.connect(folder / "run.sqlite")
    found = connection.execute("SELECT text FROM events WHERE kind = ?", [kind]).fetchall()
    connection.close()
    return [text for (text,) in found]


# --- epochs and trials -------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
def test_a_finished_run_resumes_with_more_epochs(longer, finished, workers):
    result = cerebro.resume(finished, epochs=EPOCHS + 2, workers=workers, progress=False)
    assert result.status == "finished" and hashes(result) == hashes(longer)
    assert [trial.epochs for trial in result.trials] == [EPOCHS + 2] * 4
    assert result.settings["epochs"] == EPOCHS + 2
    assert cerebro.replay(result, 1).identical
    again = cerebro.resume(finished, epochs=EPOCHS + 2)
    assert len(again.saved.units()) == len(result.saved.units())


def test_an_unfinished_run_resumes_with_more_epochs(data, longer, tmp_path):
    stop(tmp_path / "run", data)
    result = cerebro.resume(tmp_path / "run", epochs=EPOCHS + 2, progress=False)
    assert hashes(result) == hashes(longer)


def test_an_interrupted_extension_by_epochs_resumes(longer, finished, data):
    assert struck(finished, data, at=9, resume=True, epochs=EPOCHS + 2).returncode == -9
    assert cerebro.open(finished).status == "interrupted"
    assert hashes(cerebro.resume(finished, progress=False)) == hashes(longer)


def test_info_epochs_changes_on_extension_and_replay_follows(data, tmp_path):
    """A model that looks at ``info.epochs``: extended in the middle of an epoch, twice."""
    space = {"lr": [0.02, 0.05], "told": [True]}
    folder = tmp_path / "run"
    options = {"space": space, "searcher": "grid", "n_trials": None}
    stop(folder, data, at=13, **options)
    stop(folder, data, at=13, resume=True, workers=0, epochs=5)
    result = cerebro.resume(folder, epochs=7, trials=[1], progress=False)
    assert result.status == "stopped"
    assert [trial.epoch for trial in result.trials][1] == 7
    result = cerebro.resume(folder, progress=False)
    assert [trial.epoch for trial in result.trials] == [5, 7]
    assert result.status == "finished"
    plain = search(tmp_path / "plain", data, epochs=5, **options)
    assert hashes(result)[0] != hashes(plain)[0]  # it began with info.epochs == 3
    for trial in (0, 1):
        replay = cerebro.replay(result, trial)
        assert replay.identical and len(replay.epochs) == result.trials[trial].epoch
        assert result.trials[trial].load().lr == pytest.approx(
            space["lr"][trial] / {0: 5, 1: 7}[trial]
        )
    assert result.trials[1].load("last").batches > 0


def test_resume_extends_only_the_given_trials(finished, longer, data, tmp_path):
    result = cerebro.resume(finished, epochs=EPOCHS + 2, trials=[3, 1], progress=False)
    assert [trial.epoch for trial in result.trials] == [3, 5, 3, 5]
    assert result.status == "finished"
    assert [hashes(result)[t] for t in (1, 3)] == [hashes(longer)[t] for t in (1, 3)]
    result = cerebro.resume(finished, epochs=EPOCHS + 2, progress=False)
    assert hashes(result) == hashes(longer)
    assert all(cerebro.replay(result, trial).identical for trial in (0, 3))


def test_resume_finishes_only_the_given_trials_of_an_unfinished_run(data, whole, tmp_path):
    folder = tmp_path / "run"
    left = stop(folder, data, at=30)
    rest = [trial.number for trial in left.trials if trial.status == "stopped"]
    result = cerebro.resume(folder, trials=rest[0], progress=False)
    assert result.status == "stopped"
    assert result.trials[rest[0]].status == "finished"
    assert [t.number for t in result.trials if t.status == "stopped"] == rest[1:]
    result = cerebro.resume(folder, progress=False)
    assert result.status == "finished" and hashes(result) == hashes(whole)


RUNGS = ["successive_halving", "asha", "hyperband", "pbt"]


def dropped(folder, data, searcher, **options):
    """A finished search, and the first trial that its searcher stopped; not a clone."""
    result = search(folder, data, searcher=searcher, **options)
    assert result.status == "finished"
    return next(t.number for t in result.trials if t.status == "stopped" and t.parent is None)


@pytest.mark.parametrize("searcher", RUNGS)
@pytest.mark.parametrize("epochs", [None, EPOCHS, EPOCHS + 2])
def test_a_trial_dropped_by_its_searcher_can_be_resumed(
    data, whole, longer, tmp_path, searcher, epochs
):
    folder = tmp_path / "run"
    number = dropped(folder, data, searcher)
    result = cerebro.resume(folder, epochs=epochs, trials=[number], progress=False)
    assert result.status == result.trials[number].status == "finished"
    same = longer if epochs == EPOCHS + 2 else whole
    assert hashes(result)[number] == hashes(same)[number]
    assert cerebro.replay(result, number).identical
    assert cerebro.resume(folder).status == "finished"


def test_a_configuration_with_folds_dropped_by_its_searcher_can_be_resumed(data, tmp_path):
    """With folds."""
    folder = tmp_path / "run"
    number = dropped(folder, data, "successive_halving", folds=2)
    result = cerebro.resume(folder, trials=[number], progress=False)
    assert result.status == result.trials[number].status == "finished"
    assert hashes(result)[number] == hashes(search(tmp_path / "all", data, folds=2))[number]


@pytest.mark.parametrize("searcher", RUNGS)
@pytest.mark.parametrize("folds", [None, 2])
def test_a_trial_that_failed_before_a_rung_resumes_on_its_own(
    data, tmp_path, monkeypatch, searcher, folds
):
    """Nobody compares it with the others of its rung any more: it trains like one apart."""
    options = {} if folds is None else {"folds": folds}
    folder = tmp_path / "run"
    result = search(folder, data, build=build_some_fail, searcher=searcher, **options)
    number = 1 // (folds or 1)
    assert result.trials[number].status == "failed"
    monkeypatch.setenv("HEALTHY", "1")
    result = cerebro.resume(folder, trials=[number], progress=False)
    assert result.status == result.trials[number].status == "finished"
    plain = search(tmp_path / "plain", data, **options)
    assert hashes(result)[number] == hashes(plain)[number]


@pytest.mark.parametrize("searcher", [*RUNGS, "median"])
@pytest.mark.parametrize("names", [False, True])
def test_an_interrupted_resume_of_dropped_trials_resumes_again(data, tmp_path, searcher, names):
    """Going on needs no arguments, as with any interrupted run, and trains each epoch once."""
    if searcher == "median":
        search(tmp_path / "a", data, searcher=searcher)
        number = 1
    else:
        number = dropped(tmp_path / "a", data, searcher)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    more = {"epochs": EPOCHS + 3, "trials": [number] if names else None}
    expected = cerebro.resume(tmp_path / "a", progress=False, **more)
    assert struck(tmp_path / "b", data, at=12, resume=True, workers=0, **more).returncode == -9
    result = cerebro.resume(tmp_path / "b", workers=0, progress=False)
    assert result.status == "finished" and hashes(result) == hashes(expected)
    assert [t.status for t in result.trials] == [t.status for t in expected.trials]
    assert [t.epoch for t in result.trials] == [t.epoch for t in expected.trials]
    # The kill may cost the last rows of units, but no unit ran twice.
    assert len(result.saved.units()) <= len(expected.saved.units())


def test_failed_trials_are_retried_only_if_given_by_number(data, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    first = search(folder, data, build=build_some_fail)
    assert [t.status for t in first.trials] == ["finished", "failed", "finished", "finished"]
    result = cerebro.resume(folder, epochs=EPOCHS + 1, progress=False)
    assert [t.epoch for t in result.trials] == [4, 0, 4, 4]
    assert result.trials[1].status == "failed"
    monkeypatch.setenv("HEALTHY", "1")
    result = cerebro.resume(folder, trials=1, progress=False)
    assert [t.status for t in result.trials] == ["finished"] * 4
    assert result.trials[1].error is None and result.trials[1].traceback is None
    assert cerebro.replay(result, 1).identical


def build_wrong(config, info):
    raise TypeError("this is the build of another run")


@pytest.mark.filterwarnings("ignore:the source of build")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_wrong_build_leaves_finished_trials_finished(finished, longer, workers):
    for build in (build_wrong, Builder):
        with pytest.raises(InputError, match=r"build fails for finished .* the run is unchanged"):
            cerebro.resume(finished, build, epochs=EPOCHS + 2, workers=workers, progress=False)
        left = cerebro.open(finished)
        assert left.status == "finished"
        assert [trial.status for trial in left.trials] == ["finished"] * 4
    result = cerebro.resume(finished, epochs=EPOCHS + 2, workers=workers, progress=False)
    assert hashes(result) == hashes(longer)


@pytest.mark.parametrize("build", [functools.partial(resumable.build), Builder(resumable.build)])
def test_a_build_that_is_an_object_must_be_passed_to_resume(data, longer, tmp_path, build):
    folder = tmp_path / "run"
    search(folder, data, build=build)
    for use in (
        lambda: cerebro.resume(folder, epochs=EPOCHS + 2),
        lambda: cerebro.open(folder).best.load(),
        lambda: cerebro.replay(folder, 0),
    ):
        with pytest.raises(InputError, match=r"was a partial, .* pass it as build="):
            use()
    assert [trial.status for trial in cerebro.open(folder).trials] == ["finished"] * 4
    result = cerebro.resume(folder, build, epochs=EPOCHS + 2, progress=False)
    assert hashes(result) == hashes(longer)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"epochs": 2}, "epochs=2, but the run trains for 3"),
        ({"epochs": 0}, "epochs must be a whole number of at least 1"),
        ({"trials": [4]}, "there is no trial 4: the run has 0 to 3"),
        ({"trials": []}, "trials is empty"),
        ({"trials": ["a"]}, "trials must be a whole number"),
        ({"workers": -1, "epochs": 4}, "workers must be"),
        ({"callbacks": [3], "epochs": 4}, "has none of the methods"),
        ({"data": "nowhere", "epochs": 4}, "nowhere"),
    ],
)
def test_invalid_arguments_are_refused(finished, arguments, text):
    with pytest.raises(InputError, match=text):
        cerebro.resume(finished, **arguments)
    assert cerebro.open(finished).status == "finished"
    cerebro.resume(finished, epochs=4, progress=False)  # nothing is in the way


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(InputError, match="is not a run"):
        cerebro.resume(tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- the same script again ---------------------------------------------------


def test_rerunning_a_killed_script_resumes_its_run_until_it_finishes(data, whole, tmp_path):
    folder = tmp_path / "run"
    options = {"if_exists": "resume"}
    for at in (9, 20, 12):
        assert struck(folder, data, at=at, **options).returncode == -signal.SIGKILL
    assert struck(folder, data, at=9999, workers=2, **options).returncode == 0
    result = cerebro.open(folder)
    assert result.status == "finished" and hashes(result) == hashes(whole)
    assert struck(folder, data, at=1, **options).returncode == 0  # nothing is trained
    assert len(cerebro.open(folder).saved.units()) == len(result.saved.units())


def test_a_run_killed_during_its_creation_is_started_anew(data, whole, tmp_path):
    folder = tmp_path / "run"
    (folder / "states").mkdir(parents=True)
    (folder / "run.sqlite.new").write_bytes(b"x")
    (folder / "owner.lock").write_text('{"pid": 1, "host": "elsewhere"}')
    assert hashes(search(folder, data, if_exists="resume")) == hashes(whole)


def test_a_folder_of_something_else_is_refused(data, tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="exists already"):
        search(tmp_path, data, if_exists="resume")
    with pytest.raises(InputError, match="needs the run's folder"):
        search(None, data, if_exists="resume")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"seed": 4}, "seed was 3, is 4"),
        ({"batch_size": 32}, "batch_size was 16, is 32"),
        ({"threads": 2}, "threads was 1, is 2"),
        ({"epochs": 2}, "epochs was 3, is 2"),
        ({"keep": "all"}, "keep was 'best', is 'all'"),
        ({"n_trials": 3}, "n_trials was 4, is 3"),
        ({"metric": "train_loss", "mode": "min"}, "metric was 'loss', is 'train_loss'"),
        ({"stagger": False}, "stagger was True, is False"),
        ({"stop": cerebro.EarlyStopping("loss")}, "stop was None"),
        ({"points": [{"lr": 0.05}]}, "points has changed"),
        ({"space": {"lr": cerebro.uniform(0.01, 0.1)}}, "space has changed"),
        ({"searcher": "grid", "space": {"lr": [0.1, 0.2]}}, r"searcher was RandomSearch\(\)"),
        ({"validation": 0.3}, "data is a different dataset"),
        ({"validation": None}, "validation is a different dataset"),
    ],
)
def test_changes_that_would_alter_trials_are_refused(data, finished, changes, text):
    with pytest.raises(InputError, match=text):
        search(finished, data, if_exists="resume", **changes)


def test_settings_that_do_not_alter_trials_may_change(data, finished):
    result = search(
        finished,
        data,
        if_exists="resume",
        workers=1,
        width=3,
        max_retries=0,
        time_limit=1000.0,
        live_models=2,
        callbacks=[Strike(10_000)],
    )
    assert result.status == "finished"


def test_a_run_is_extended_by_trials_and_epochs_at_once(data, finished, tmp_path):
    expected = search(tmp_path / "more", data, n_trials=6, epochs=4)
    result = search(finished, data, if_exists="resume", n_trials=6, epochs=4)
    assert hashes(result) == hashes(expected)
    assert result.settings["n_trials"] == 6 and result.settings["epochs"] == 4
    assert all(cerebro.replay(result, trial).identical for trial in (0, 5))
    assert cerebro.resume(finished).status == "finished"


def test_an_adaptive_searcher_adds_epochs_and_trials_in_two_calls(data, tmp_path):
    """One after the other, because new trials are compared by the new number of epochs."""
    folder = tmp_path / "run"
    options = {"searcher": "asha", "if_exists": "resume"}
    search(folder, data, **options)
    with pytest.raises(InputError, match=r"need two calls: first one with epochs=4 and as many"):
        search(folder, data, n_trials=6, epochs=4, **options)
    assert [t.epoch for t in search(folder, data, epochs=4, **options).trials].count(4) >= 1
    result = search(folder, data, n_trials=6, epochs=4, **options)
    assert result.status == "finished" and len(result.trials) == 6


# --- who trains it -----------------------------------------------------------


HOLDER = """
import sys, resumable
class Wait:
    def on_unit_end(self, trial, metrics):
        print("training", flush=True)
        sys.stdin.readline()
resumable.search(sys.argv[1], sys.argv[2], callbacks=[Wait()])
"""


def test_a_second_process_is_refused_with_the_pid_of_the_first(data, whole, tmp_path):
    folder = tmp_path / "run"
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        [os.path.dirname(resumable.__file__), environment["PYTHONPATH"]]  # noqa: PTH120
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, folder, data],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert holder.stdout.readline() == "training\n"
    text = f"being trained by process {holder.pid} on {os.uname().nodename}"
    with pytest.raises(InputError, match=text):
        cerebro.resume(folder)
    with pytest.raises(InputError, match=text):
        search(folder, data, if_exists="resume")
    assert cerebro.open(folder).status == "running"
    second = subprocess.run(
        [*CLI, "resume", folder], capture_output=True, text=True, env=environment, check=False
    )
    assert second.returncode == 1 and text in second.stderr
    holder.kill()
    holder.communicate()
    assert cerebro.open(folder).status == "interrupted"
    assert {t.status for t in cerebro.open(folder).trials} == {"stopped"}
    assert hashes(cerebro.resume(folder, progress=False)) == hashes(whole)


def test_a_second_search_of_the_same_process_is_refused(data, tmp_path):
    folder = tmp_path / "run"
    errors = []

    class Second:
        def on_epoch_end(self, trial, metrics):
            assert cerebro.open(folder).status == "running"
            for attempt in (
                lambda: cerebro.resume(folder),
                lambda: search(folder, data, if_exists="resume"),
            ):
                thread = threading.Thread(target=self.refused, args=(attempt,))
                thread.start()
                thread.join()

        def refused(self, attempt):
            try:
                attempt()
            except InputError as error:
                errors.append(str(error))

    result = search(folder, data, callbacks=[Second()], n_trials=1, epochs=1)
    assert result.status == "finished"
    assert len(errors) == 2 and all("by this process" in error for error in errors)


# --- what goes on over a resume ----------------------------------------------


def test_early_stopping_counts_over_a_resume(data, tmp_path):
    stop_rule = cerebro.EarlyStopping("loss", patience=2, min_delta=1e9)
    expected = search(tmp_path / "whole", data, stop=stop_rule, epochs=6)
    assert [trial.epoch for trial in expected.trials] == [3] * 4
    for at in (11, 26, 47):
        folder = tmp_path / str(at)
        with pytest.raises(KeyboardInterrupt):
            search(folder, data, stop=stop_rule, epochs=6, callbacks=[Strike(at, signal.SIGINT)])
        result = cerebro.resume(folder, progress=False)
        assert result.status == "finished"
        assert [trial.status for trial in result.trials] == ["stopped"] * 4
        assert hashes(result) == hashes(expected)
    # Stopped by the rule is over; only who names a trial lets it go on, and the rule anew.
    assert hashes(cerebro.resume(folder, epochs=9, progress=False)) == hashes(expected)
    result = cerebro.resume(folder, trials=[2], epochs=9, progress=False)
    assert [trial.epoch for trial in result.trials] == [3, 3, 6, 3]


@pytest.mark.parametrize("keep", ["last", "all"])
def test_keep_applies_over_a_resume(data, tmp_path, keep):
    stop(tmp_path / "run", data, at=33, keep=keep)
    result = cerebro.resume(tmp_path / "run", progress=False)
    kept = [[e.epoch for e in t.record.epochs if e.state_file] for t in result.trials]
    assert kept == [[2] if keep == "last" else [0, 1, 2]] * 4
    assert result.verify(), str(result.verify())


def test_callbacks_of_a_resume_receive_only_the_remaining_events(data, tmp_path):
    class Recorder:
        def __init__(self):
            self.calls = []

        def __getattr__(self, name):
            if not name.startswith("on_"):
                raise AttributeError(name)
            return lambda *arguments: self.calls.append((name, *arguments))

    folder = tmp_path / "run"
    left = stop(folder, data, at=41)
    recorder = Recorder()
    result = cerebro.resume(folder, callbacks=[recorder], progress=False)
    names = [call[0] for call in recorder.calls]
    assert names[0] == "on_run_start" and names[-1] == "on_run_end"
    assert names.count("on_unit_end") == UNITS - 41
    done = sum(trial.epoch for trial in left.trials)
    assert names.count("on_epoch_end") == 4 * EPOCHS - done
    rest = [trial.number for trial in left.trials if trial.status == "stopped"]
    started = [call[1].number for call in recorder.calls if call[0] == "on_trial_start"]
    ended = [call[1].number for call in recorder.calls if call[0] == "on_trial_end"]
    assert sorted(started) == sorted(ended) == rest
    assert result.status == "finished"


def test_the_time_limit_counts_anew(data, whole, tmp_path):
    folder = tmp_path / "run"

    class Late:
        """Ends the time at a unit: the clock is set forward."""

        def __init__(self, at):
            self.left = at

        def on_unit_end(self, trial, metrics):
            self.left -= 1
            if self.left == 0:
                self.coordinator.clock._begun -= 1e6

    def run_with(late, go):
        from cerebro.coordinator import conduct, coordinator

        class Coordinator(coordinator.Coordinator):
            def __init__(self, *arguments, **keywords):
                super().__init__(*arguments, **keywords)
                late.coordinator = self

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(conduct, "Coordinator", Coordinator)
            return go([late])

    first = run_with(Late(9), lambda c: search(folder, data, time_limit=1e5, callbacks=c))
    assert first.status == "stopped" and len(first.saved.units()) == 9
    second = run_with(Late(20), lambda c: cerebro.resume(folder, callbacks=c, progress=False))
    assert second.status == "stopped" and len(second.saved.units()) == 29
    result = cerebro.resume(folder, progress=False)
    assert result.status == "finished" and hashes(result) == hashes(whole)


def test_a_search_without_n_trials_resumes_its_searcher(data, tmp_path):
    """Only time ends the search: its searcher goes on where it was."""
    folder = tmp_path / "run"
    options = {"n_trials": None, "time_limit": 1e5, "epochs": 1}
    with pytest.raises(KeyboardInterrupt):
        search(folder, data, callbacks=[Strike(700, signal.SIGINT)], **options)
    before = [trial.config for trial in cerebro.open(folder).trials]
    with pytest.raises(KeyboardInterrupt):
        search(folder, data, callbacks=[Strike(100, signal.SIGINT)], if_exists="resume", **options)
    after = [trial.config for trial in cerebro.open(folder).trials]
    assert after[: len(before)] == before and len(after) > len(before)
    space = cerebro.Space({"lr": cerebro.loguniform(1e-2, 1e-1)})
    assert after == [space.sample(3, trial) for trial in range(len(after))]


# --- data, code and environment ----------------------------------------------


def test_resume_takes_the_new_path_of_moved_data(data, whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(data, tmp_path / "before")
    stop(folder, tmp_path / "before")
    (tmp_path / "before").rename(tmp_path / "after")
    with pytest.raises(InputError, match="give their new path with data="):
        cerebro.resume(folder)
    result = cerebro.resume(folder, data=tmp_path / "after", progress=False)
    assert result.status == "finished" and hashes(result) == hashes(whole)
    # The run has recorded where its data is now.
    assert cerebro.open(folder).best.evaluate()["loss"] == result.best.metrics["loss"]
    assert result.verify()


def test_a_finished_run_takes_the_new_path_of_moved_data(data, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(data, tmp_path / "before")
    metrics = search(folder, tmp_path / "before").best.metrics
    (tmp_path / "before").rename(tmp_path / "after")
    for use in (
        lambda: cerebro.open(folder).best.load(),
        lambda: cerebro.open(folder).best.evaluate(tmp_path / "after"),
        lambda: cerebro.replay(folder, 0),
    ):
        with pytest.raises(InputError, match=r"run's data is not at .*before.*resume .* --data"):
            use()
    command = ["replay", str(folder), "--trial", "0", "--epochs", "1", "--data"]
    assert cli.main([*command, str(tmp_path / "after")]) == 0
    assert "every state identical" in capsys.readouterr().out
    cerebro.resume(folder, data=tmp_path / "other", progress=False)  # which changes nothing
    cerebro.resume(folder, data=tmp_path / "after", progress=False)
    best = cerebro.open(folder).best
    assert best.evaluate() == {"loss": metrics["val_loss"]}
    assert np.shape(best.load().state_dict()["w"]) == (3,)
    assert best.evaluate(tmp_path / "after")["loss"] > 0.0
    assert cerebro.open(folder).verify()


def test_a_copy_of_the_data_is_not_recorded(data, tmp_path):
    folder = tmp_path / "run"
    stop(folder, data)
    shutil.copytree(data, tmp_path / "copy")
    cerebro.resume(folder, data=tmp_path / "copy", progress=False)
    shutil.rmtree(tmp_path / "copy")
    assert cerebro.open(folder).best.evaluate()


def test_other_data_are_refused(data, tmp_path):
    folder = tmp_path / "run"
    stop(folder, data)
    x = np.random.default_rng(1).normal(size=(230, 3))
    other = cerebro.shard({"x": x, "y": x.sum(1)}, tmp_path / "other", shards=SHARDS)
    with pytest.raises(InputError, match=r"has changed.*with data="):
        cerebro.resume(folder, data=other)
    assert cerebro.open(folder).status == "stopped"


def test_a_changed_source_warns(data, tmp_path, monkeypatch):
    folder = tmp_path / "run"
    monkeypatch.syspath_prepend(tmp_path)
    source = (
        "from resumable import Model\ndef build(config, info):\n    return Model(config, info)\n"
    )
    (tmp_path / "model_to_resume.py").write_text(source)
    import model_to_resume

    with pytest.raises(KeyboardInterrupt):
        search(folder, data, build=model_to_resume.build, callbacks=[Strike(9, signal.SIGINT)])
    (tmp_path / "model_to_resume.py").write_text(source + "# changed\n")
    importlib.reload(model_to_resume)  # as a new program would import it
    with pytest.warns(UserWarning, match=r"model_to_resume.py, which defines build, has changed"):
        assert cerebro.resume(folder, progress=False).status == "finished"


def test_a_build_that_cannot_be_imported_must_be_passed(data, tmp_path):
    def build(config, info):
        return resumable.Model(config, info)

    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt, match=r"cerebro.resume\('.*run', build\)"):
        search(folder, data, build=build, callbacks=[Strike(9, signal.SIGINT)])
    with pytest.raises(InputError, match="pass it as build="):
        cerebro.resume(folder)
    assert cerebro.resume(folder, build, progress=False).status == "finished"


def test_a_changed_environment_warns_and_is_recorded(data, tmp_path):
    folder = tmp_path / "run"
    stop(folder, data)
    connection = sqlite3.connect(folder / "run.sqlite")
    (text,) = connection.execute("SELECT value FROM meta WHERE key = 'environment'").fetchone()
    environment = json.loads(text)
    environment["packages"]["numpy"] = "1.0.0"
    connection.execute(
        "UPDATE meta SET value = ? WHERE key = 'environment'", [json.dumps(environment)]
    )
    connection.commit()
    connection.close()
    with pytest.warns(UserWarning, match=r"packages.numpy was 1.0.0, is"):
        cerebro.resume(folder, progress=False)
    (event,) = events(folder, "resumed")
    assert f"process {os.getpid()} on" in event and "packages.numpy was 1.0.0" in event


# --- from the command line ---------------------------------------------------

FILE = """
import os, signal
import cerebro
from resumable import Model, Strike

def build(config, info):
    return Model(config, info)

space = {{"lr": cerebro.loguniform(1e-2, 1e-1)}}
data = {data!r}
settings = dict(epochs=3, n_trials=4, validation=0.2, batch_size=16, seed=3, workers=0)
if "AT" in os.environ:
    settings["callbacks"] = [Strike(int(os.environ["AT"]), int(os.environ["SIGNAL"]))]
"""


def test_the_command_line_resumes_a_run(data, whole, tmp_path):
    (tmp_path / "experiment.py").write_text(FILE.format(data=str(data)))
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        [os.path.dirname(resumable.__file__), environment["PYTHONPATH"]]  # noqa: PTH120
    )

    def cli(*arguments, **variables):
        return subprocess.run(
            [*CLI, *arguments],
            cwd=tmp_path,
            env=environment | variables,
            capture_output=True,
            text=True,
            check=False,
        )

    run = ("run", "experiment.py", "--run", "run", "--if-exists", "resume", "--progress", "none")
    for number, status in ((signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)):
        done = cli(*run, AT="9", SIGNAL=str(int(number)))
        assert done.returncode == status, done.stderr
        if status > 0:
            assert "python -m cerebro resume run" in done.stderr
            assert "Traceback" not in done.stderr
    assert "interrupted" in cli("show", "run").stdout
    done = cli("resume", "run", "--trials", "0,2", "--progress", "none")
    assert done.returncode == 1 and "the run is stopped, not finished" in done.stderr
    done = cli("resume", "run", "--workers", "2", "--progress", "lines")
    assert done.returncode == 0, done.stderr
    assert "python -m cerebro show run" in done.stdout
    assert hashes(cerebro.open(tmp_path / "run")) == hashes(whole)
    assert cli(*run).returncode == 0
    done = cli("resume", "run", "--epochs", "2")
    assert done.returncode == 1 and "error: epochs=2, but the run trains for 3" in done.stderr
