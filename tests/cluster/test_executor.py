"""A search on a cluster gives what it gives on one machine, and moves no more than it must."""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

ray = pytest.importorskip("ray")

import ballast  # noqa: E402
import resumable  # noqa: E402

import cerebro  # noqa: E402
from benchmarks.cluster_soak.nodes import cached_bytes, held_bytes  # noqa: E402
from cerebro.cluster.engines.ray_nodes import connect  # noqa: E402
from cerebro.cluster.supply import EVERYWHERE  # noqa: E402
from cerebro.cluster.workers import Pace  # noqa: E402
from cerebro.data.cache import Cache  # noqa: E402
from cerebro.errors import InputError  # noqa: E402

STATE_BYTES = 8 * ballast.BALLAST + 10_000
"""More than a state of `ballast.Model` has."""


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory):
    return resumable.search(tmp_path_factory.mktemp("runs") / "local", data, workers=2)


def same(found, expected):
    assert resumable.hashes(found) == resumable.hashes(expected)
    assert [t.config for t in found.trials] == [t.config for t in expected.trials]
    assert [t.status for t in found.trials] == [t.status for t in expected.trials]
    assert [t.metrics for t in found.trials] == [t.metrics for t in expected.trials]
    assert found.best.number == expected.best.number


def moves(result):
    """Sizes of the states that hopped, and of those at epochs' ends, by the run's record."""
    with sqlite3.connect(result.path / "run.sqlite") as connection:
        rows = connection.execute(
            "SELECT trial, step, hopped, state_bytes FROM units ORDER BY trial, epoch, step"
        ).fetchall()
    hops = [before[3] for before, (*_, hopped, _) in pairwise(rows) if hopped]
    return hops, [size for _, step, _, size in rows if step == max(row[1] for row in rows)]


def test_a_new_cluster_here_needs_no_address_and_ends_with_the_search(data, tmp_path, expected):
    assert not ray.is_initialized()
    executor = cerebro.ray.Executor(workers=2)
    same(resumable.search(tmp_path / "run", data, executor=executor), expected)
    assert executor.traffic.data_bytes == 0  # both read the data where they are
    assert not ray.is_initialized()


def test_a_search_on_three_nodes_matches_two_local_workers(
    cluster, data, tmp_path, expected, apart
):
    executor = cluster.executor()
    result = resumable.search(tmp_path / "run", data, executor=executor)
    same(result, expected)
    assert result.status == "finished"
    assert not result.verify().problems
    traffic = executor.traffic
    # Every shard went to each node, once, and so did the validation rows.
    sent = {place: [s for p, s in traffic.shards if p == place] for place, _ in traffic.shards}
    assert len(sent) == 3
    assert all(sorted(shards) == [EVERYWHERE, *range(6)] for shards in sent.values())
    assert set(traffic.shards.values()) == {1}
    # A state was fetched for every hop, and for nothing else.
    hops, ends = moves(result)
    assert traffic.states == len(hops)
    assert traffic.state_bytes == sum(hops)
    assert traffic.kept_bytes == sum(ends)


def test_shards_are_kept_for_the_next_search(cluster, data, tmp_path, expected, monkeypatch):
    """Also when a node makes room, which then takes what no live search uses."""
    monkeypatch.setenv("CEREBRO_CACHE_LIMIT", "1")
    executor = cluster.executor()
    folders = list(cluster.folder.glob("node-*"))

    def shards():
        return {shard for folder in folders for shard in folder.glob("data/*/shard-*")}

    class MakeRoom:
        def on_epoch_end(self, trial, metrics):
            before = shards()
            for folder in folders:
                Cache(folder).make_room(1)
            assert len(before) == len(shards()) > 6

    result = resumable.search(tmp_path / "run", data, executor=executor, callbacks=[MakeRoom()])
    same(result, expected)
    assert executor.traffic.data_bytes == 0
    for folder in folders:
        Cache(folder).make_room(1)
    assert not shards()


def test_a_cluster_run_can_be_opened_replayed_and_resumed_locally(cluster, data, tmp_path, apart):
    first = resumable.search(tmp_path / "run", data, executor=cluster.executor(), epochs=2)
    again = cerebro.open(tmp_path / "run", build=resumable.build)
    assert resumable.hashes(again) == resumable.hashes(first)
    assert cerebro.replay(again, 1, resumable.build).identical
    longer = cerebro.resume(tmp_path / "run", resumable.build, epochs=3, workers=0, progress=False)
    assert [len(trial.history) for trial in longer.trials] == [3] * 4
    assert cerebro.replay(longer, 2, resumable.build).identical


def test_replicas_place_each_pool_on_that_many_nodes(cluster, many_shards, tmp_path, apart):
    options = {"shuffle": "shards"}
    executor = cluster.executor(replicas=2, workers=3)

    class Look:
        def on_run_start(self, run):
            self.holders = dict(executor.holders())

    look = Look()
    result = resumable.search(
        tmp_path / "run", many_shards, executor=executor, callbacks=[look], **options
    )
    same(result, resumable.search(tmp_path / "here", many_shards, **options))
    assert [len(holders) for holders in look.holders.values()] == [2, 2, 2]


def test_a_shared_folder_is_read_by_all(cluster, data, tmp_path, expected):
    executor = cluster.executor(shared_path=data.parent)
    assert executor.holders() is None
    same(resumable.search(tmp_path / "run", data, executor=executor), expected)
    assert executor.traffic.data_bytes == 0


def test_clones_carry_their_parents_states(cluster, data, tmp_path, apart):
    def search(folder, **options):
        searcher = cerebro.PBT(interval=1, population=4)
        return resumable.search(
            folder, data, build=ballast.build, epochs=3, searcher=searcher, **options
        )

    found = search(tmp_path / "cluster", executor=cluster.executor())
    here = search(tmp_path / "here", workers=2)
    assert any(trial.parent is not None for trial in here.trials)
    same(found, here)


def test_catch_matches_base_classes_of_errors_raised_on_nodes(cluster, data, tmp_path, apart):
    optuna = pytest.importorskip("optuna")

    class Mine(ValueError):
        pass

    class Model(resumable.Model):
        def train_batch(self, batch):
            if self.raises is not None:
                raise self.raises("bad")
            return super().train_batch(batch)

    def build(trial, info):
        model = Model({"lr": trial.suggest_float("lr", 0.01, 0.1)}, info)
        model.raises = {1: Mine, 2: optuna.TrialPruned}.get(trial.number)
        return model

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.tell(study.ask(), state=optuna.trial.TrialState.FAIL)  # numbers differ from the run's
    cerebro.optuna.optimize(
        *(study, build, data),
        n_trials=4, epochs=2, batch_size=10, catch=ValueError, run=tmp_path / "run",
        executor=cluster.executor(),
    )  # fmt: skip
    states = [trial.state.name for trial in study.trials]
    assert states == ["FAIL", "FAIL", "PRUNED", "COMPLETE", "COMPLETE"]
    first = cerebro.open(tmp_path / "run").trials[0].record
    assert first.raised.bases[1] == "builtins.ValueError"
    assert first.raised.place in first.error


def test_a_separate_validation_dataset_gives_the_same_states(cluster, data, tmp_path, apart):
    rng = np.random.default_rng(7)
    x = rng.normal(size=(90, 3))
    other = cerebro.shard({"x": x, "y": x.sum(1)}, tmp_path / "other", shards=2)
    found = resumable.search(
        tmp_path / "cluster", data, validation=other, executor=cluster.executor()
    )
    same(found, resumable.search(tmp_path / "here", data, validation=other))


def test_data_damaged_on_a_node_are_sent_again(cluster, data, tmp_path, expected):
    """A shard with a bit that has changed, and validation rows of which the end is missing."""
    same(resumable.search(tmp_path / "first", data, executor=cluster.executor()), expected)
    whole = cerebro.Dataset(data).shards.manifest.checksum
    for node in cluster.folder.glob("node-*"):
        for file in node.glob("data/*/shard-00002/x.npy"):
            content = bytearray(file.read_bytes())
            content[-1] ^= 1
            is_shard = file.parent.parent.name == whole
            file.write_bytes(content if is_shard else content[:-8])
    executor = cluster.executor()
    with pytest.warns(UserWarning, match="sent again") as warned:
        result = resumable.search(tmp_path / "run", data, executor=executor)
    same(result, expected)
    told = [str(warning.message) for warning in warned]
    for what in ("x.npy is damaged.*: the shard is sent", "x.npy.*: the validation rows are sent"):
        assert any(re.search(what, text) for text in told), told
    assert {shard for _, shard in executor.traffic.shards} == {2, EVERYWHERE}


def test_stopped_and_resumed_folds_match_those_of_one_machine(cluster, data, tmp_path, apart):
    """Every row is held out once, so every node has all of them, each once."""
    cluster.restore()
    first, second = cluster.executor(), cluster.executor()
    options = {"folds": 3, "n_trials": 2, "epochs": 2}

    class Stop:
        units = 0

        def on_unit_end(self, trial, metrics):
            self.units += 1
            if self.units == 17:
                cerebro.control.stop(tmp_path / "cluster")

    stopped = resumable.search(
        tmp_path / "cluster", data, executor=first, callbacks=[Stop()], **options
    )
    assert stopped.status == "stopped"
    sent = first.traffic.shards
    assert len(sent) == 3 and set(sent.values()) == {1} and {s for _, s in sent} == {EVERYWHERE}
    found = cerebro.resume(stopped.path, resumable.build, executor=second, progress=False)
    assert second.traffic.data_bytes == 0
    same(found, resumable.search(tmp_path / "here", data, **options))
    folds = cerebro.open(tmp_path / "here").best.folds
    assert [f.state_hash for f in found.best.folds] == [f.state_hash for f in folds]


def test_a_slow_node_gets_less_work(
    cluster, many_shards, tmp_path, apart, monkeypatch, even_pace, frequent_looks
):
    monkeypatch.setattr(Pace, "speeds", even_pace)
    executor = cluster.executor()

    class Look:
        def on_run_start(self, run):
            self.nodes = executor.nodes()
            self.holders = executor.holders()

    look = Look()
    options = {"build": ballast.build_slow, "epochs": 5, "shuffle": "shards"}
    found = resumable.search(
        tmp_path / "cluster", many_shards, executor=executor, callbacks=[look], **options
    )
    assert {len(holders) for holders in look.holders.values()} == {1}  # a third of all for each
    units = Counter(look.nodes[u["worker"]] for u in found.units() if u["kind"] == "train")
    slow, *fast = (units[node.node_id] for node in reversed(cluster.nodes))
    assert slow + sum(fast) == 4 * 5 * 27  # three pools of nine groups
    assert 0 < slow < min(fast)
    same(found, resumable.search(tmp_path / "here", many_shards, **options))


class Memory:
    """Looks at the states that agents hold now and then: two of a trial."""

    def __init__(self, executor, trials):
        self.executor = executor
        self.most = 2 * trials * STATE_BYTES
        self.units = self.looks = 0

    def on_unit_end(self, trial, metrics):
        self.units += 1
        if self.units % 60 == 20:
            states = self.executor._states._states.values()
            held = sum(state.nbytes for of_trial in states for state in of_trial)
            assert 0 < held <= self.most
            agents = [remote.agent.pid for remote in self.executor._members.workers.values()]
            # Besides, states that agents will be told to free, and those of units in flight.
            assert 0 < sum(map(held_bytes, agents)) <= self.most + 12 * STATE_BYTES
            self.looks += 1


@pytest.mark.parametrize("trials", [4, 32])
def test_no_trial_has_a_copy_of_the_data(cluster, tmp_path, apart, trials):
    """Each node holds data and validation rows once; agents two states of a trial, no data."""
    x = np.random.default_rng(1).normal(size=(30_000, 3))
    data = cerebro.shard({"x": x, "y": x.sum(1)}, tmp_path / "data", shards=6)
    cluster.restore()
    executor = cluster.executor()
    memory = Memory(executor, trials)
    found = resumable.search(
        tmp_path / "run", data.path, build=ballast.build, executor=executor, callbacks=[memory],
        n_trials=trials, epochs=1, batch_size=2500,
    )  # fmt: skip
    assert memory.looks == len(range(20, 7 * trials, 60))
    assert max(unit["state_bytes"] for unit in found.units()) <= STATE_BYTES < data.nbytes / 2
    validation = data.split(0.8, 0.2)[1].nbytes
    headers = (3 + 3) * 6 * 2 * 128  # of each column of each shard
    assert cached_bytes(cluster.folder) == 3 * (data.nbytes + validation) + headers


def test_tunes_trials_train_on_all_nodes(cluster, data, tmp_path):
    """Proxies are dealt over the nodes by Tune, and the engine's workers by us."""
    tune = pytest.importorskip("ray.tune")
    ray.init(address=cluster.address, log_to_driver=False, ignore_reinit_error=True)
    work = cerebro.ray.trainable(
        resumable.build, cerebro.Dataset(data), validation=0.2, batch_size=16, epochs=2, seed=3,
        executor=cluster.executor(),
    )  # fmt: skip
    results = tune.Tuner(
        work,
        param_space={"lr": tune.grid_search([0.01, 0.05])},
        run_config=tune.RunConfig(storage_path=str(tmp_path), name="exp", verbose=0),
    ).fit()
    ray.kill(ray.get_actor(work.spec.name))
    assert results.num_errors == 0
    run = cerebro.open(tmp_path / "exp" / "cerebro")
    rates = [trial.config["lr"] for trial in run.trials]
    searched = resumable.search(
        tmp_path / "own", data, space={"lr": rates}, searcher="grid", n_trials=None, epochs=2
    )
    assert sorted(rates) == [0.01, 0.05]
    assert resumable.hashes(run) == resumable.hashes(searched)
    for result in results:
        trial = searched.trials[result.metrics["cerebro_trial"]]
        assert result.metrics["state_hash"] == trial.state_hash
    assert len({unit["worker"] for unit in run.units()}) == 2  # each trial stays on its worker


def test_a_process_reconnects_to_its_cluster_by_localhost(cluster):
    """Ray has the node's own address for it, with which the second call compares."""
    port = cluster.address.rpartition(":")[2]
    for host in ("localhost", "127.0.0.1"):
        first, second = (connect(f"{host}:{port}", None) for _ in range(2))
        assert first == second and not second.is_ours
    with pytest.raises(InputError, match="this process belongs to the Ray cluster at"):
        connect("localhost:1", None)
