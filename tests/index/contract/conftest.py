"""The backends there are, each for every test of the suite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import pytest

from policies.view import CandidateId
from tests.effort import examples
from tests.index.contract.backend import BACKENDS, Backend
from tests.index.contract.engine import PlayedEngine
from tests.index.contract.redis_backend import SharedInRedis
from tests.redis_servers import RedisServer, binary


class Subject(NamedTuple):
    """A backend, and how long to torment it: a Redis takes its time."""

    make: Callable[[Mapping[CandidateId, PlayedEngine]], Backend]
    num_examples: int
    num_walks: int


CALM = ("write", "hold", "replay", "connect")
IN_REDIS: dict[str, tuple[str, ...]] = {
    "shared through Redis": (*CALM, "suspect", "lose answer", "lose redis"),
    "after a restart": (*CALM, "kill", "lose lease", "sweep"),
    "after a flush": (*CALM, "flush", "lose redis", "kill"),
}


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], RedisServer]]:
    """Start a server of each version on first use."""
    started: dict[str, RedisServer] = {}

    def server(version: str) -> RedisServer:
        if version not in started:
            folder = tmp_path_factory.mktemp("redis")
            started[version] = RedisServer(binary(version), folder).start()
        return started[version]

    yield server
    for each in started.values():
        each.stop()


_NAMES = (
    *(backend.__name__ for backend in BACKENDS),
    *(f"{n}, {v}" for n in IN_REDIS for v in ("6.2", "7")),
)


@pytest.fixture(params=_NAMES)
def subject(request: pytest.FixtureRequest, servers: Callable[[str], RedisServer]) -> Subject:
    """Give each backend."""
    name, _, version = request.param.partition(", ")
    for backend in BACKENDS:
        if backend.__name__ == name:
            return Subject(backend, num_examples=examples(40), num_walks=examples(100))
    make = partial(SharedInRedis, server=servers(version), happenings=IN_REDIS[name])
    return Subject(make, num_examples=examples(8), num_walks=examples(8))
