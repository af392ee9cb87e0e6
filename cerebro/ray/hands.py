"""Workers as the coordinator sees them, and what they have been given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cerebro.ray.connection import Node
from cerebro.ray.messages import Begin
from cerebro.unit import Job


@dataclass
class Hand:
    """A worker as the coordinator sees it."""

    number: int
    actor: Any
    node: Node
    name: str
    """The node's, for people."""
    place: str
    reads_all: bool
    """Whether it reads all shards where they are."""
    begin: Begin
    stale: set[int] = field(default_factory=set)
    """Trials of which another worker has made a newer state."""
    silent_looks: int = 0
    has_answered: bool = False
    is_gone: bool = False
    """Whether the actor, and not only its process, is lost."""
    node_is_gone: bool = False


@dataclass
class Call:
    """What a worker has been given."""

    serial: int
    job: Job
    packed: Any = None
    """Reference to the state that it will leave."""
    reloaded: bool = False
    """Whether its shard was damaged on the node and has been sent again."""
