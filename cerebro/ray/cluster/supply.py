"""Send shards to nodes, once to each place, and keep track of those that have arrived.

Each shard of the training data is sent to some places. Data for validation are sent to all places:
the rows of the validation view or, with folds, which hold out every row in turn, all data.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor as Threads
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cerebro.data import Dataset
from cerebro.data.manifest import FILE_NAME, shard_folder
from cerebro.data.placed import write_view
from cerebro.errors import InputError
from cerebro.machine.files import read_bytes
from cerebro.ray.cluster.cache import Cache, cache_folder
from cerebro.ray.cluster.connection import ClusterNode, cause_of
from cerebro.ray.cluster.messages import DataAt, NodeReport, RemoteWorker, Traffic
from cerebro.ray.cluster.placement import Placement
from cerebro.worker.messages import RunContext

BEGIN_SECONDS = 120.0
"""The time within which a node must report its shards."""

EVERYWHERE = -1
"""A shard number that means the data that all nodes get."""


class Supply:
    """The data of a run on the nodes of a cluster; see the module's docstring.

    Parameters
    ----------
    shared_path
        The path at which all nodes read the data; None: the data are sent.
    here
        The coordinator's node, which reads the original data.
    traffic
        Counts the bytes that are sent.
    """

    def __init__(
        self,
        ray: Any,
        context: RunContext,
        shared_path: Path | None,
        here: str,
        traffic: Traffic,
    ) -> None:
        self.arrived: dict[str, set[int]] = {}
        """The shards that places have, and `EVERYWHERE`."""
        self._ray = ray
        self._context = context
        self._shared_path = shared_path
        self._here = here
        self._traffic = traffic
        self._lock = threading.Lock()
        self._cache: Cache | None = None
        self._written: Dataset | None = None  # the rows of the validation view

    def close(self) -> None:
        """Remove the temporary files."""
        if self._cache is not None:
            self._cache.close()

    # --- data that nodes read without a copy -----------------------------------

    def asked(self, node: ClusterNode) -> list[tuple[list[str], str]]:
        """Return each data set's possible paths on a node, and its checksum."""
        return [(self._paths(node, data), data._manifest.checksum) for data in self._data_sets()]

    def check_reads(self, report: NodeReport) -> None:
        """Raise InputError if a node does not see the shared data."""
        if self._shared_path is None:
            return
        for data, found in zip(self._data_sets(), report.at, strict=True):
            if found is None:
                raise InputError(
                    f"node {report.name} does not find the data set {data.path.name} at "
                    f"shared_path={str(self._shared_path)!r}: mount the same folder on every node, "
                    "or leave out shared_path= to have the data copied"
                )

    def _data_sets(self) -> list[Dataset]:
        context = self._context
        return [context.train, *([] if context.validation is None else [context.validation])]

    def _paths(self, node: ClusterNode, data: Dataset) -> list[str]:
        paths = []
        shared = self._shared_path
        if shared is not None:
            paths = [shared, shared / data.path.name]
            if shared in data.path.parents:
                paths.insert(0, data.path)
        if node.id == self._here:
            paths.append(data.path)
        return [str(path) for path in paths]

    # --- dealing -----------------------------------------------------------------

    def deal(
        self, remotes: Sequence[RemoteWorker], replicas: int, threads: Threads
    ) -> Placement | None:
        """Send every place its shards; return the placement, or None if all places read all data.

        Raises
        ------
        InputError
            If a node cannot store its shards.
        """
        senders = {remote.place: remote for remote in reversed(remotes) if not remote.reads_all}
        asked = {place: threads.submit(self.introduce, remote) for place, remote in senders.items()}
        cached = {place: self._finished(job) for place, job in asked.items()}
        if not cached:
            return None
        placement = Placement(self._context.train._shard_rows())
        for number, remote in enumerate(remotes):
            placement.add_worker(number, remote.place)
        copies = replicas if self._context.folds is None else len(placement.shards)
        dealt = placement.deal(copies, cached)
        jobs = [
            threads.submit(self.send, senders[place], sorted({*dealt[place]} - {*have}))
            for place, have in cached.items()
        ]
        for job in jobs:
            self._finished(job)
        for place, have in cached.items():
            self.arrived[place] = {*have, *dealt[place]}
        every = set(range(self._context.train.num_shards))
        if all(shards == every for shards in placement.shards.values()):
            return None
        placement.workers.clear()  # workers are added when they get their numbers
        return placement

    def admit(self, remote: RemoteWorker, *, whole: bool) -> None:
        """Send a new node the data that all nodes get, and with `whole` all shards."""
        have = self.introduce(remote)
        if whole:
            every = range(self._context.train.num_shards)
            self.send(remote, sorted({*every} - {*have}))
            have = [EVERYWHERE, *every]
        self.arrived[remote.place] = set(have)

    def introduce(self, remote: RemoteWorker) -> list[int]:
        """Send a node the manifests and the data that all nodes get; return its shards."""
        self._send_everywhere(remote)
        begun = begin_data(self._ray, remote.actor, self._train, BEGIN_SECONDS)
        return [EVERYWHERE, *begun]

    def is_there(self, remote: RemoteWorker, shard: int) -> bool:
        """Whether a worker can read a shard."""
        return remote.reads_all or shard in self.arrived.get(remote.place, ())

    def send(self, remote: RemoteWorker, shards: Sequence[int]) -> None:
        """Send shards to a node; called in a separate thread."""
        if EVERYWHERE in shards:
            self._send_everywhere(remote)
        shards = [shard for shard in shards if shard != EVERYWHERE]
        sent = send_shards(self._ray, remote.actor, self._train, shards)
        self._note(remote.place, shards, sent)

    def with_data(self, remote: RemoteWorker) -> RemoteWorker:
        """Return the worker with the paths of the data that were sent to its node."""
        if remote.reads_all:
            return remote
        sources = [self._train]
        if self._context.validation is not None and self._everywhere is not None:
            sources.append(self._everywhere)
        checksums = [source.checksum for source in sources]
        folders = self._ray.get(remote.actor.data_folders.remote(checksums))
        at = [
            DataAt(source.spec_at(folder), True)
            for source, folder in zip(sources, folders, strict=True)
        ]
        remote.begin = replace(remote.begin, train=at[0], validation=at[1] if len(at) > 1 else None)
        return remote

    def mend(self, remote: RemoteWorker, shard: int) -> None:
        """Delete a damaged shard on a node and send it again; called in a separate thread."""
        source = self._train if shard != EVERYWHERE else self._everywhere
        assert source is not None
        shards = [shard] if shard != EVERYWHERE else [*source.shards]
        forget = remote.actor.forget_damaged.options(concurrency_group="control")
        self._ray.get(forget.remote(source.checksum, shards))
        self.send(remote, [shard])

    def called(self, shard: int) -> str:
        """Return the subject of a message about a shard."""
        if shard != EVERYWHERE:
            return f"shard {shard} is"
        return "the validation rows are" if self._context.folds is None else "the shard is"

    # --- inside ----------------------------------------------------------------

    @property
    def _train(self) -> LocalData:
        return LocalData(self._context.train)

    @property
    def _everywhere(self) -> LocalData | None:
        """The data that all nodes get; None without validation."""
        view = self._context.validation
        if self._context.folds is not None:
            return self._train
        if view is None:
            return None
        if view._is_whole():
            return LocalData(view)
        with self._lock:
            if self._written is None:
                # In scratch, where the next coordinator removes the files of a killed one.
                self._cache = Cache(cache_folder())
                folder = Path(tempfile.mkdtemp(prefix="view-", dir=self._cache.scratch()))
                self._written = write_view(view, folder)
        return LocalData(self._written)

    def _send_everywhere(self, remote: RemoteWorker) -> None:
        source = self._everywhere
        if source is not None:
            have = begin_data(self._ray, remote.actor, source, BEGIN_SECONDS)
            missing = [shard for shard in source.shards if shard not in have]
            sent = send_shards(self._ray, remote.actor, source, missing)
            self._note(remote.place, [EVERYWHERE] if missing else [], sent)

    def _note(self, place: str, shards: Sequence[int], sent: int) -> None:
        with self._lock:
            for shard in shards:
                key = place, shard
                self._traffic.shards[key] = self._traffic.shards.get(key, 0) + 1
            self._traffic.data_bytes += sent

    def _finished(self, job: Any) -> Any:
        """Wait until data have been sent; return the result of `job`.

        Raises
        ------
        InputError
            If a node cannot store them.
        """
        ray = self._ray
        try:
            return job.result()
        except ray.exceptions.RayError as error:
            raise InputError(
                f"a node cannot store the data: {cause_of(error)}: is there room in its cache "
                "folder ($CEREBRO_CACHE)?"
            ) from error


PIECE_BYTES = 8 << 20

WINDOW = 4
"""The number of pieces sent at a time; more would only fill the object store."""


@dataclass(frozen=True)
class LocalData:
    """A data set on the coordinator's disk, possibly the rows of a view."""

    data: Dataset

    @property
    def checksum(self) -> str:
        return self.data._manifest.checksum

    @property
    def folder(self) -> Path:
        return self.data.path

    def spec_at(self, folder: str) -> Mapping[str, Any]:
        """Return the view's description with the data in `folder`."""
        return {**self.data.spec(), "path": folder}

    @property
    def shards(self) -> range:
        return range(len(self.data._manifest.shards))


def begin_data(ray: Any, actor: Any, source: LocalData, timeout: float) -> list[int]:
    """Send a data set's manifest to a node; return the shards that it has already."""
    manifest = read_bytes(source.folder / FILE_NAME)
    here = actor.begin_data.options(concurrency_group="control").remote(manifest)
    return list(ray.get(here, timeout=timeout))


def send_shards(ray: Any, actor: Any, source: LocalData, shards: Iterable[int]) -> int:
    """Send shards to a node, which checks them; return the number of bytes.

    Raises
    ------
    CorruptDataError
        If a file here does not match the manifest.
    RayError
        If the node is gone.
    OSError
        If a file here cannot be read.
    """
    receive = actor.receive.options(concurrency_group="control")
    finish = actor.finish.options(concurrency_group="control")
    sent = 0
    for shard in shards:
        source.data._check_sizes(shard)
        waiting: list[Any] = []
        for name in source.data._manifest.shards[shard].files:
            path = source.folder / shard_folder(shard) / name
            with path.open("rb") as file:
                offset = 0
                while piece := file.read(PIECE_BYTES):
                    waiting.append(receive.remote(source.checksum, shard, name, offset, piece))
                    offset += len(piece)
                    if len(waiting) == WINDOW:
                        ray.get(waiting.pop(0))
                sent += offset
        ray.get(waiting)
        ray.get(finish.remote(source.checksum, shard))
    return sent
