"""Send shards to nodes, once to each place, and keep track of those that have arrived.

Shards travel in *lots*: the pools of a search (see `cerebro.data.order`), all shards with
``shuffle="rows"``, or single shards to be derived. Each lot of the training data is sent to some
places. Validation data is sent to all places: the rows of the validation view or, with folds, which
hold out every row in turn, all data.

Data in object storage is not sent: every place copies its own shards from there. Validation rows
that are a view of such data are not written separately, so every place then copies all shards.

`Supply` sends; `Transfers` has it send during a run, while workers wait.
"""

from __future__ import annotations

import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor as Threads
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from cerebro.cluster.hub import AgentError, Hub, Node, RemoteAgent, describe_cause
from cerebro.cluster.messages import DataAt, NodeReport, Sent, Traffic
from cerebro.cluster.workers import Events, Pace, Placement, RemoteWorker
from cerebro.data import Dataset
from cerebro.data.cache import Cache, cache_folder, read_manifest_at
from cerebro.data.manifest import FILE_NAME, FileEntry, shard_folder
from cerebro.data.placed import write_view
from cerebro.errors import CorruptDataError, InputError, text_of
from cerebro.machine.files import is_plain_name, read_bytes
from cerebro.machine.objects import Objects, StorageError
from cerebro.worker.messages import RunContext, ShardsPlaced

BEGIN_SECONDS = 120.0  # the time within which a node must report its shards
PIECE_BYTES = 8 << 20
WINDOW = 4  # the number of pieces sent at a time; more would only fill memory

EVERYWHERE = -1  # the number of the lot that all nodes get: the validation data

Arrival = Callable[[RemoteWorker, int, BaseException | None, Sequence[int]], None]


class Supply:
    """The data of a run on the nodes of a cluster; see the module's docstring.

    Nodes read the data at `shared_path`, a path or a URL in object storage; if it is None, shards
    are sent, each to `replicas` places. `traffic` counts the bytes. `threads` send to several nodes
    at a time.
    """

    def __init__(
        self,
        hub: Hub,
        context: RunContext,
        shared_path: Path | str | None,
        replicas: int,
        traffic: Traffic,
        threads: Threads,
    ) -> None:
        self.derives = isinstance(context.build, Sent)  # whether the tasks are shards, not units
        self.placement: Placement | None = None  # which lots are where; None: all are everywhere
        self.arrived: dict[str, set[int]] = {}  # the lots that places have, and `EVERYWHERE`
        self._have: dict[str, set[int]] = {}  # the shards that places have
        self._hub = hub
        self._context = context
        self._shared = shared_path
        self._replicas = replicas
        self._threads = threads
        self._pulling: dict[str, threading.Lock] = {}  # by place: one call at a time
        self._traffic = traffic
        self._lock = threading.Lock()
        self._cache: Cache | None = None
        self._written: Dataset | None = None  # the rows of the validation view

    @cached_property
    def _lots(self) -> Sequence[Sequence[int]]:
        if self.derives:
            return [[shard] for shard in range(self._context.train.num_shards)]
        return self._context.order().pools

    def close(self) -> None:
        if self._cache is not None:
            self._cache.close()

    # --- data that nodes read without a copy -----------------------------------

    def list_data_paths(self, node: Node) -> list[tuple[list[str], str]]:
        """Return each dataset's possible paths on a node, and its checksum, or raise InputError."""
        _ = self._urls  # here, in the thread that starts the run
        return [(self._paths(node, data), _checksum(data)) for data in self._datasets]

    @cached_property
    def _urls(self) -> dict[str, str]:
        """The URLs of the datasets in object storage, by checksum."""
        urls = {}
        for data in self._datasets:
            url = data.url
            if url is None and isinstance(self._shared, str):
                url = find_dataset_url(self._shared, data)
            if url is not None:
                urls[_checksum(data)] = url
        return urls

    def check_reads(self, report: NodeReport) -> None:
        """Raise InputError if a node does not see the shared data."""
        if not isinstance(self._shared, Path):
            return
        for data, path in zip(self._datasets, report.at, strict=True):
            if path is None:
                raise InputError(
                    f"node {report.name} does not find the dataset {data.path.name} at "
                    f"shared_path={str(self._shared)!r}: mount the same folder on every node, "
                    "or leave out shared_path= to have the data copied"
                )

    @property
    def _datasets(self) -> list[Dataset]:
        pair = self._context.train, self._context.validation
        return [data for data in pair if data is not None]

    def _paths(self, node: Node, data: Dataset) -> list[str]:
        paths: list[str | Path] = []
        shared = self._shared
        if isinstance(shared, Path):
            paths = [shared, shared / data.path.name]
            if shared in data.path.parents:
                paths.insert(0, data.path)
        if self._hub.is_here(node) and data.url is None:  # a copy here may lack shards
            paths.append(data.path)
        return [str(path) for path in paths]

    # --- data that are sent ----------------------------------------------------

    def supply_first_nodes(self, remotes: Sequence[RemoteWorker]) -> None:
        """Send every place its lots; raise InputError if a node cannot store them."""
        receivers = {remote.place: remote for remote in reversed(remotes) if not remote.reads_all}
        asked = {
            place: self._threads.submit(self.send_common_data, remote)
            for place, remote in receivers.items()
        }
        cached = {place: self._await_transfer(job) for place, job in asked.items()}
        if not cached:
            return
        rows = self._context.train.view.shard_rows
        placement = Placement([sum(rows[shard] for shard in lot) for lot in self._lots])
        for number, remote in enumerate(remotes):
            placement.add_worker(number, remote.place)
        places = len(placement.lots)
        copies = self._replicas
        if not self.derives:  # every place gets a lot, even if there are fewer lots than places
            copies = max(copies, -(-places // len(self._lots)))
        source = self._everywhere
        if source is not None and _checksum(source) == _checksum(self._context.train):
            copies = places
        assigned = placement.assign_lots(copies, cached)
        jobs = [
            self._threads.submit(self.send, receivers[place], sorted({*assigned[place]} - {*have}))
            for place, have in cached.items()
        ]
        for job in jobs:
            self._await_transfer(job)
        for place, have in cached.items():
            self.arrived[place] = {*have, *assigned[place]}
        every = set(range(len(self._lots)))
        if any(lots != every for lots in placement.lots.values()):
            placement.workers.clear()  # workers are added when they get their numbers
            self.placement = placement

    def supply_new_node(self, remote: RemoteWorker) -> None:
        """Send a new node the data that all nodes get, and all lots if all read all."""
        if remote.reads_all:
            return
        have = self.send_common_data(remote)
        if self.placement is None:
            every = range(len(self._lots))
            self.send(remote, sorted({*every} - {*have}))
            have = [EVERYWHERE, *every]
        self.arrived.setdefault(remote.place, set()).update(have)

    def send_common_data(self, remote: RemoteWorker) -> list[int]:
        """Send a node the manifests and the data that all nodes get; return its lots."""
        self._send_everywhere(remote)
        begun = set(begin_data(remote.agent, self._context.train))
        with self._lock:
            self._have.setdefault(remote.place, set()).update(begun)
        return [EVERYWHERE, *(n for n, lot in enumerate(self._lots) if begun.issuperset(lot))]

    def is_there(self, remote: RemoteWorker, lot: int) -> bool:
        return remote.reads_all or lot in self.arrived.get(remote.place, ())

    def send(self, remote: RemoteWorker, lots: Sequence[int]) -> None:
        """Send lots to a node; called in a separate thread."""
        if EVERYWHERE in lots:
            self._send_everywhere(remote)
        with self._lock:
            have = self._have.setdefault(remote.place, set())
            shards = {shard for lot in lots if lot != EVERYWHERE for shard in self._lots[lot]}
            missing = sorted(shards - have)
        sent = self._transfer_shards(remote, self._context.train, missing)
        with self._lock:
            have.update(missing)
        self._count_traffic(remote.place, missing, sent)

    def _transfer_shards(self, remote: RemoteWorker, data: Dataset, shards: Sequence[int]) -> int:
        """Send shards to a node, or have it copy them; return the number of bytes sent."""
        url = self._urls.get(_checksum(data))
        if url is None:
            return send_shards(remote.agent, data, shards)
        if shards:
            with self._lock:
                turn = self._pulling.setdefault(remote.place, threading.Lock())
            with turn:  # a node answers only two calls at a time, and pings must get through
                remote.agent.control("pull", url, _checksum(data), list(shards)).result()
        return 0

    def set_data_paths(self, remote: RemoteWorker) -> None:
        """Complete a worker's description of the run: where its node has the data."""
        sources, folders = self._datasets, remote.report.at
        if not remote.reads_all:
            if self._context.validation is not None and self._everywhere is not None:
                sources = [self._context.train, self._everywhere]
            asked = remote.agent.call("data_folders", [*map(_checksum, sources)])
            folders = self._await_transfer(asked)
        at = (
            DataAt({**source.spec(), "path": folder}, not remote.reads_all)
            for source, folder in zip(sources, folders, strict=True)
        )
        remote.begin = replace(remote.begin, data=tuple(at))

    def resend_damaged(self, remote: RemoteWorker, lot: int) -> None:
        """Delete the damaged shards of a lot on a node and send them again; called in a thread."""
        source = self._context.train if lot != EVERYWHERE else self._everywhere
        assert source is not None
        shards = [*self._lots[lot]] if lot != EVERYWHERE else [*range(source.num_shards)]
        remote.agent.control("forget_damaged", _checksum(source), shards).result()
        have = begin_data(remote.agent, self._context.train)
        with self._lock:
            self._have[remote.place] = set(have)
        self.send(remote, [lot])

    def describe_lot(self, lot: int) -> str:
        """Return a lot's name and its verb, as in "shard 3 is sent again"."""
        if lot == EVERYWHERE and self._context.folds is None:
            return "the validation rows are"
        single = lot != EVERYWHERE and len(self._lots[lot]) == 1
        return f"shard {self._lots[lot][0]} is" if single else "the shard is"

    # --- inside ----------------------------------------------------------------

    @property
    def _everywhere(self) -> Dataset | None:
        """The dataset that is sent to every node; None if the run has no validation data."""
        view = self._context.validation
        if self._context.folds is not None:
            return self._context.train
        if view is None or view.view.is_whole or view.url is not None:
            return view
        with self._lock:
            if self._written is None:
                # In scratch, where the next coordinator removes the files of a killed one.
                self._cache = Cache(cache_folder())
                folder = Path(tempfile.mkdtemp(prefix="view-", dir=self._cache.scratch()))
                self._written = write_view(view, folder)
        return self._written

    def _send_everywhere(self, remote: RemoteWorker) -> None:
        source = self._everywhere
        if source is not None:
            have = begin_data(remote.agent, source)
            missing = [shard for shard in range(source.num_shards) if shard not in have]
            sent = self._transfer_shards(remote, source, missing)
            self._count_traffic(remote.place, [EVERYWHERE] if missing else [], sent)

    def forget(self, place: str) -> None:
        if self.placement is not None:
            self.placement.remove_place(place)
        self.arrived.pop(place, None)
        with self._lock:
            self._have.pop(place, None)

    def _count_traffic(self, place: str, shards: Sequence[int], sent: int) -> None:
        with self._lock:
            for shard in shards:
                key = place, shard
                self._traffic.shards[key] = self._traffic.shards.get(key, 0) + 1
            self._traffic.data_bytes += sent

    def _await_transfer(self, job: Any) -> Any:
        """Return a transfer's result; raise InputError or CorruptDataError if it has failed."""
        try:
            return job.result()
        except AgentError as error:
            if error.cause is None:
                text = f"a node was lost while it received the data ({text_of(error)})"
                raise InputError(f"{text}: start the search again") from error
            if isinstance(error.cause, CorruptDataError):
                raise CorruptDataError(text_of(error.cause)) from error
            if isinstance(error.cause, (StorageError, InputError)):
                raise InputError(
                    f"a node cannot copy the data: {text_of(error.cause)}: are its credentials and "
                    "its packages those that this process has?"
                ) from error
            raise InputError(
                f"a node cannot store the data: {describe_cause(error)}: is there "
                "room in its cache folder ($CEREBRO_CACHE)?"
            ) from error


def _checksum(data: Dataset) -> str:
    """Return the checksum of a dataset's files, which all of its views share."""
    return data.shards.manifest.checksum


def find_dataset_url(shared: str, data: Dataset) -> str:
    """Return the URL of a dataset that is at `shared` or in it; raise InputError if it is not."""
    for url in (shared.rstrip("/"), f"{shared.rstrip('/')}/{data.path.name}"):
        manifest = read_manifest_at(Objects(url))[1]
        if manifest is not None and manifest.checksum == _checksum(data):
            return url
    raise InputError(
        f"the dataset {data.path.name} is not at shared_path={shared!r}: upload it, or leave out "
        "shared_path= to have the data sent"
    )


def begin_data(agent: RemoteAgent, data: Dataset) -> list[int]:
    """Send a dataset's manifest to a node; return the shards that it has already."""
    manifest = read_bytes(data.path / FILE_NAME)
    return list(agent.control("begin_data", manifest).result(BEGIN_SECONDS))


def send_shards(agent: RemoteAgent, data: Dataset, shards: Iterable[int]) -> int:
    """Send shards to a node, which checks them; return the number of bytes.

    Raises CorruptDataError or OSError because of a file here, and AgentError if the node is gone.
    """
    checksum, sent = _checksum(data), 0
    for shard in shards:
        data.shards.check_sizes(shard)
        waiting: list[Future[Any]] = []
        for name in data.shards.manifest.shards[shard].files:
            with (data.path / shard_folder(shard) / name).open("rb") as file:
                offset = 0
                while piece := file.read(PIECE_BYTES):
                    waiting.append(agent.control("receive", checksum, shard, name, offset, piece))
                    offset += len(piece)
                    if len(waiting) == WINDOW:
                        waiting.pop(0).result()
                sent += offset
        for piece_sent in waiting:
            piece_sent.result()
        agent.control("finish", checksum, shard).result()
    return sent


def fetch_shard(
    agent: RemoteAgent, shard: int, files: Mapping[str, FileEntry], folder: Path
) -> int:
    """Fetch the files of a shard that a node has made; return the number of bytes.

    `folder` must not exist. Hashes are not checked. Raises CorruptDataError for an invalid file
    name, OSError if a file cannot be written here, and AgentError if the node is gone.
    """
    folder.mkdir()
    for name, entry in files.items():
        if not is_plain_name(name):
            raise CorruptDataError(f"shard {shard} has a file {name!r}")
        with (folder / name).open("xb") as file:
            waiting: deque[Future[Any]] = deque()
            for offset in range(0, entry.bytes, PIECE_BYTES):
                if len(waiting) == WINDOW:
                    file.write(waiting.popleft().result())
                size = min(PIECE_BYTES, entry.bytes - offset)
                waiting.append(agent.control("read_piece", shard, name, offset, size))
            for piece in waiting:
                file.write(piece.result())
    return sum(entry.bytes for entry in files.values())


class Transfers:
    """The lots of a run: where they are, and which are on their way.

    When a lot has arrived, or has failed to, `handle_arrival` is called with the worker to whose
    node it was sent, the lot, the error, and the numbers of the workers that wait for it.
    """

    def __init__(self, supply: Supply, events: Events, handle_arrival: Arrival) -> None:
        self.pace = Pace()
        self._supply = supply
        self._events = events
        self._handle_arrival = handle_arrival
        self._loading: set[tuple[str, int]] = set()  # place and lot
        self._waiting: dict[tuple[str, int], list[int]] = {}

    def add_worker(self, remote: RemoteWorker, *, with_node: bool = False) -> None:
        """Add a worker, and `with_node` the lots that are at its place already."""
        placement = self._supply.placement
        if placement is None:
            return
        placement.add_worker(remote.number, remote.place)
        if with_node:
            for lot in self._supply.arrived.get(remote.place, set()) - {EVERYWHERE}:
                placement.add_lot(remote.place, lot)

    def remove_worker(self, remote: RemoteWorker, *, with_place: bool) -> None:
        self.pace.forget(remote.number)
        if self._supply.placement is not None:  # which keeps the place: it may be useful again
            self._supply.placement.workers.pop(remote.number, None)
        if with_place:
            self._supply.forget(remote.place)

    def holders(self) -> Mapping[int, Sequence[int]] | None:
        """Return the workers that can read each lot; None: all read all."""
        return None if self._supply.placement is None else self._supply.placement.holders()

    def load(self, remote: RemoteWorker, lot: int) -> None:
        """Send a lot to a worker's node, where all its workers can read it."""
        if self._supply.placement is not None:
            self._supply.placement.add_lot(remote.place, lot)
            self._fetch(remote, lot)

    def is_there(self, remote: RemoteWorker, lot: int | None) -> bool:
        """Whether a worker can read a lot; None: it needs none."""
        return lot is None or self._supply.is_there(remote, lot)

    def wait_for(self, remote: RemoteWorker, lot: int, *, damaged: bool = False) -> None:
        """Have a worker wait for a lot; send it to the node unless it is on its way."""
        self._waiting.setdefault((remote.place, lot), []).append(remote.number)
        self._fetch(remote, lot, damaged=damaged)

    def mark_damaged(self, remote: RemoteWorker, lot: int) -> str:
        """Note that the copy of a lot at a worker's place is damaged; return the lot's name."""
        self._supply.arrived[remote.place].discard(lot)
        return self._supply.describe_lot(lot)

    def rebalance(self, remotes: Sequence[RemoteWorker]) -> None:
        """Copy one lot from a slow place to a fast one, if that helps."""
        if self._supply.placement is None or self._supply.derives or self._loading:
            return
        wish = self._supply.placement.choose_lot_to_copy(self.pace.speeds())
        if wish is not None:
            lot, place = wish
            remote = next(remote for remote in remotes if remote.place == place)
            if self._supply.is_there(remote, lot):
                self._add_lot(place, lot)
            else:
                self._fetch(remote, lot)

    def _add_lot(self, place: str, lot: int) -> None:
        placement = self._supply.placement
        if placement is not None and not placement.has_lot(place, lot):
            placement.add_lot(place, lot)
            self._events.now.append(ShardsPlaced())

    def _fetch(self, remote: RemoteWorker, lot: int, *, damaged: bool = False) -> None:
        key = remote.place, lot
        if self._supply.is_there(remote, lot) or key in self._loading:
            return
        self._loading.add(key)
        if damaged:
            job = self._events.fetch_pool.submit(self._supply.resend_damaged, remote, lot)
        else:
            job = self._events.fetch_pool.submit(self._supply.send, remote, [lot])
        self._events.when_done(job, self._finish, remote, lot)

    def _finish(self, receiver: RemoteWorker, lot: int, done: Any) -> None:
        key = receiver.place, lot
        self._loading.discard(key)
        error = done.exception()
        if error is None:
            self._supply.arrived.setdefault(receiver.place, set()).add(lot)
            if lot != EVERYWHERE:
                self._add_lot(receiver.place, lot)
        self._handle_arrival(receiver, lot, error, self._waiting.pop(key, ()))


def find_fatal_error(receiver: RemoteWorker, lot: int, error: BaseException) -> Exception | None:
    """Return what ends the run after a failed transfer; None: only the agent has failed."""
    if isinstance(error, (CorruptDataError, OSError)):  # the files here
        return CorruptDataError(text_of(error))
    cause = getattr(error, "cause", None)
    if isinstance(cause, CorruptDataError):
        return CorruptDataError(f"node {receiver.name}: {text_of(cause)}")
    if isinstance(cause, OSError):
        what = "the validation rows" if lot == EVERYWHERE else "its shards"
        return OSError(
            f"node {receiver.name} cannot store {what} ({text_of(cause)}): make room in its "
            "cache folder ($CEREBRO_CACHE), or give it access to the data, and resume the run"
        )
    return None
