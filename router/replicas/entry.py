"""A replica as a source found it, and as the registry says that it should be."""

from __future__ import annotations

from typing import Literal, NamedTuple

from msgspec import Struct

from router.base.messages import Evacuation
from router.config import ReplicaConfig


class Found(Struct, frozen=True, kw_only=True):
    """A replica as a source found it."""

    replica: ReplicaConfig
    is_ready: bool = True


class Ordered(NamedTuple):
    """An order that a replica confirmed. `is_lost`: it lost its cache.

    `state` None: it was ordered to sleep or to wake up, and its metrics say the rest.
    """

    replica: str
    state: Literal["paused", "awake"] | None
    is_lost: bool = False


class Entry(Struct, frozen=True, kw_only=True):
    """A replica as it should be. A leaving one drains, and is removed when it is idle."""

    name: str  # in this router's metrics and headers
    identity: str  # among routers
    replica: ReplicaConfig
    draining: bool = False
    evacuation: Evacuation | None = None  # while it drains; None: nothing stays there
    leaving: bool = False
    source: str | None = None  # which found it; None: it is configured, or was added by an order
    is_ready: bool = True  # by its source

    @property
    def is_offered(self) -> bool:
        """Whether it may have new requests."""
        return self.is_ready and not (self.draining or self.leaving)
