"""Sends shards to nodes, each once to a place, and keeps track of what has arrived.

The training data are dealt, whole shards, each to some places. What validates is sent
everywhere: the rows of the validation view; with folds, which hold out every row in turn,
all data.
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
from cerebro.ray.cluster import supply as shipping
from cerebro.ray.cluster.cache import Cache, cache_folder
from cerebro.ray.cluster.connection import Node, cause_of
from cerebro.ray.cluster.messages import DataAt, Hand, NodeReport, Traffic
from cerebro.ray.cluster.placement import Placement
from cerebro.worker.messages import RunContext

BEGIN_SECONDS = 120.0
"""How long a node may take to say what it has."""

EVERYWHERE = -1
"""Stands, among shards, for what all nodes are sent."""


class Supply:
    """The data of a run on the nodes of a cluster; see the module's text.

    Parameters
    ----------
    shared_path
        Where all nodes read the data; None: they are sent them.
    here
        The coordinator's node, which reads them where they are.
    traffic
        Where to write down what is sent.
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
        """Remove what was written in order to be sent."""
        if self._cache is not None:
            self._cache.close()

    # --- what can be read without being sent -----------------------------------

    def asked(self, node: Node) -> list[tuple[list[str], str]]:
        """For each data set the paths where a node may find it, and its checksum."""
        return [(self._paths(node, data), data._manifest.checksum) for data in self._data_sets()]

    def check_reads(self, report: NodeReport) -> None:
        """Raise InputError if a node does not see what all are to see."""
        if self._shared_path is None:
            return
        for data, found in zip(self._data_sets(), report.at, strict=True):
            if found is None:
                raise InputError(
                    f"node {report.name} does not find the data set {data.path.name} at "
                    f"shared_path={str(self._shared_path)!r}: mount the same folder on every node, "
                    "or leave shared_path= out to have the data copied"
                )

    def _data_sets(self) -> list[Dataset]:
        context = self._context
        return [context.train, *([] if context.validation is None else [context.validation])]

    def _paths(self, node: Node, data: Dataset) -> list[str]:
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

    def deal(self, hands: Sequence[Hand], replicas: int, threads: Threads) -> Placement | None:
        """Send every place what it is to have; return what lies where, None: all everywhere.

        Raises
        ------
        InputError
            If a node cannot take it.
        """
        senders = {hand.place: hand for hand in reversed(hands) if not hand.reads_all}
        asked = {place: threads.submit(self.introduce, hand) for place, hand in senders.items()}
        cached = {place: self._finished(job) for place, job in asked.items()}
        if not cached:
            return None
        placement = Placement(self._context.train._shard_rows())
        for number, hand in enumerate(hands):
            placement.add_worker(number, hand.place)
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
        placement.workers.clear()  # each is added when it gets its number
        return placement

    def admit(self, hand: Hand, *, whole: bool) -> None:
        """Send a node that has joined what all have, and all shards if it is to have them."""
        have = self.introduce(hand)
        if whole:
            every = range(self._context.train.num_shards)
            self.send(hand, sorted({*every} - {*have}))
            have = [EVERYWHERE, *every]
        self.arrived[hand.place] = set(have)

    def introduce(self, hand: Hand) -> list[int]:
        """Send a node the manifests and what all have; return what it has then."""
        self._send_everywhere(hand)
        begun = shipping.begin(self._ray, hand.actor, self._train, BEGIN_SECONDS)
        return [EVERYWHERE, *begun]

    def is_there(self, hand: Hand, shard: int) -> bool:
        """Whether a worker can read a shard."""
        return hand.reads_all or shard in self.arrived.get(hand.place, ())

    def send(self, hand: Hand, shards: Sequence[int]) -> None:
        """Send shards to a node; in a thread of its own."""
        if EVERYWHERE in shards:
            self._send_everywhere(hand)
        shards = [shard for shard in shards if shard != EVERYWHERE]
        sent = shipping.send(self._ray, hand.actor, self._train, shards)
        self._note(hand.place, shards, sent)

    def with_data(self, hand: Hand) -> Hand:
        """Say where the data are that a node was sent."""
        if hand.reads_all:
            return hand
        sources = [self._train]
        if self._context.validation is not None and self._everywhere is not None:
            sources.append(self._everywhere)
        checksums = [source.checksum for source in sources]
        folders = self._ray.get(hand.actor.data_folders.remote(checksums))
        at = [
            DataAt(source.spec_at(folder), True)
            for source, folder in zip(sources, folders, strict=True)
        ]
        hand.begin = replace(hand.begin, train=at[0], validation=at[1] if len(at) > 1 else None)
        return hand

    def mend(self, hand: Hand, shard: int) -> None:
        """Have a node delete what is damaged of a shard, and send it again; in a thread."""
        source = self._train if shard != EVERYWHERE else self._everywhere
        assert source is not None
        shards = [shard] if shard != EVERYWHERE else [*source.shards]
        forget = hand.actor.forget_damaged.options(concurrency_group="control")
        self._ray.get(forget.remote(source.checksum, shards))
        self.send(hand, [shard])

    def called(self, shard: int) -> str:
        """What a shard is, for people."""
        if shard != EVERYWHERE:
            return f"shard {shard} is"
        return "the validation rows are" if self._context.folds is None else "the shard is"

    # --- inside ----------------------------------------------------------------

    @property
    def _train(self) -> Source:
        return Source(self._context.train)

    @property
    def _everywhere(self) -> Source | None:
        """What all nodes are sent; None: nothing validates."""
        view = self._context.validation
        if self._context.folds is not None:
            return self._train
        if view is None:
            return None
        if view._is_whole():
            return Source(view)
        with self._lock:
            if self._written is None:
                # In scratch: what a coordinator that is killed leaves there, the next one removes.
                self._cache = Cache(cache_folder())
                folder = Path(tempfile.mkdtemp(prefix="view-", dir=self._cache.scratch()))
                self._written = write_view(view, folder)
        return Source(self._written)

    def _send_everywhere(self, hand: Hand) -> None:
        source = self._everywhere
        if source is not None:
            have = shipping.begin(self._ray, hand.actor, source, BEGIN_SECONDS)
            missing = [shard for shard in source.shards if shard not in have]
            sent = shipping.send(self._ray, hand.actor, source, missing)
            self._note(hand.place, [EVERYWHERE] if missing else [], sent)

    def _note(self, place: str, shards: Sequence[int], sent: int) -> None:
        with self._lock:
            for shard in shards:
                key = place, shard
                self._traffic.shards[key] = self._traffic.shards.get(key, 0) + 1
            self._traffic.data_bytes += sent

    def _finished(self, job: Any) -> Any:
        """Wait for data that are on their way; returns what `job` does.

        Raises
        ------
        InputError
            If a node cannot take them.
        """
        ray = self._ray
        try:
            return job.result()
        except ray.exceptions.RayError as error:
            raise InputError(
                f"a node cannot be sent the data: {cause_of(error)}: is there room in its cache "
                "folder ($CEREBRO_CACHE)?"
            ) from error


PIECE_BYTES = 8 << 20

WINDOW = 4
"""Pieces on their way at a time: more would only fill the object store."""


@dataclass(frozen=True)
class Source:
    """A data set on the coordinator's disk, or of a view's rows."""

    data: Dataset

    @property
    def checksum(self) -> str:
        return self.data._manifest.checksum

    @property
    def folder(self) -> Path:
        return self.data.path

    def spec_at(self, folder: str) -> Mapping[str, Any]:
        """What opens the view where a node has the data."""
        return {**self.data.spec(), "path": folder}

    @property
    def shards(self) -> range:
        return range(len(self.data._manifest.shards))


def begin(ray: Any, actor: Any, source: Source, timeout: float) -> list[int]:
    """Tell a node about a data set; return the shards that it has already."""
    manifest = read_bytes(source.folder / FILE_NAME)
    here = actor.begin_data.options(concurrency_group="control").remote(manifest)
    return list(ray.get(here, timeout=timeout))


def send(ray: Any, actor: Any, source: Source, shards: Iterable[int]) -> int:
    """Send shards to a node, which checks them; return the number of bytes.

    Raises
    ------
    CorruptDataError
        If a file here is not what the manifest says.
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
