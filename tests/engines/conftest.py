"""Two real vLLM replicas for the whole run, alive and with cold caches for every test."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest

from tests.engines.harness import (
    ENGINE_READY_S,
    Engine,
    EventTap,
    Router,
    all_up,
    answers,
    wait_until,
)

TEST_TIMEOUT_S = 300  # the first test waits for both engines

LONGEST = (
    "test_8_routers", "test_4_policies", "test_5_agents", "test_3_predictions", "test_9_segments",
    "test_3_hybrid", "test_6_faults", "test_7_pool",
)  # fmt: skip
"""Files that take a minute of processor time or two, in the order in which they are begun: the
others are shared out last, so that the workers end together."""


def pytest_configure() -> None:
    """End the engines with the run, also when the run is ended from outside (`timeout`, CI)."""
    signal.signal(signal.SIGTERM, _leave)


def _leave(*_: object) -> NoReturn:
    pytest.exit("terminated", returncode=143)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests with real engines more time than the others have; begin with the longest."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONGEST)))


@pytest.fixture(scope="session")
def log_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def pair(log_dir: Path) -> Iterator[tuple[Engine, Engine]]:
    """Start both engines at once; the router will call them r1 and r2."""
    engines = (Engine("r1", log_dir), Engine("r2", log_dir))
    with all_up(engines):
        yield engines


@pytest.fixture(scope="module")
def living_pair(pair: tuple[Engine, Engine]) -> tuple[Engine, Engine]:
    """Both replicas, alive when a file's first test begins."""
    revive(pair)
    return pair


@pytest.fixture
def replicas(living_pair: tuple[Engine, Engine]) -> tuple[Engine, Engine]:
    """Both replicas, alive, caches cold."""
    revive(living_pair)
    for engine in living_pair:
        engine.reset_prefix_cache()
    return living_pair


def revive(engines: tuple[Engine, Engine]) -> None:
    """Start those that were killed."""
    dead = [engine for engine in engines if not answers(f"{engine.url}/health")]
    for engine in dead:
        engine.kill()
        engine.start()
    for engine in dead:
        engine.wait_ready("/health", ENGINE_READY_S)


@pytest.fixture
def taps(replicas: tuple[Engine, Engine]) -> Iterator[tuple[EventTap, EventTap]]:
    """What both replicas publish during the test."""
    with EventTap(replicas[0].events_endpoint) as one, EventTap(replicas[1].events_endpoint) as two:
        yield one, two


@pytest.fixture(scope="session")
def lasting_router(pair: tuple[Engine, Engine], log_dir: Path) -> Iterator[Router]:
    with Router(pair, log_dir) as running:
        yield running


@pytest.fixture
def router(replicas: tuple[Engine, Engine], lasting_router: Router) -> Router:
    """The router in front of both, default policy, nothing but --replica given.

    One process for all tests that do it no harm; it has seen that the caches are cold again.
    """

    def is_cold() -> bool:
        with suppress(TimeoutError):
            wait_until(lambda: lasting_router.metric("warmroute_index_blocks") == 0, 5, "cold")
            return True
        # It has asked a replica whether it takes token ids: with a prompt, which stays.
        for engine in replicas:
            engine.reset_prefix_cache()
        return False

    wait_until(is_cold, 60, "cold caches")
    return lasting_router


@pytest.fixture
def start_router(replicas: tuple[Engine, Engine], log_dir: Path) -> Callable[..., Router]:
    """Make a router for both replicas with a policy or a configuration of one's own."""
    return lambda **options: Router(replicas, log_dir, **options)
