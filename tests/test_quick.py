"""tests.quick: which tests a change touches."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.quick import ROOT, choose

FILES = (
    "tests/compose/test_files.py",
    "tests/emulator/test_app.py",
    "tests/engines/test_1_engine.py",
    "tests/loadtest/replay/test_driver.py",
    "tests/loadtest/test_agents.py",
    "tests/loadtest/test_bench.py",
    "tests/policies/snapshots.py",
    "tests/policies/test_ring.py",
    "tests/test_backoff.py",
    "tests/test_docs.py",
    "tests/test_upstream.py",
    "tests/tokens/test_encoder.py",
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A small repository."""
    for name in FILES:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    (tmp_path / "tests/test_docs.py").write_text("from tests.docs_blocks import blocks\n")
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "found"),
    [
        ("router/tokens/encoder.py", ["tests/tokens"]),
        ("router/base/backoff.py", ["tests/test_backoff.py"]),
        ("router/upstream/client.py", ["tests/test_upstream.py"]),
        ("policies/ring.py", ["tests/policies"]),
        ("loadtest/emulator/app.py", ["tests/emulator"]),
        ("loadtest/replay/driver.py", ["tests/loadtest/replay"]),
        ("loadtest/agents.py", ["tests/loadtest/test_agents.py"]),
        ("loadtest/dev/bench/rig.py", ["tests/loadtest/test_bench.py"]),
        ("docker/compose.yaml", ["tests/compose"]),
        ("docs/get-started/demo.md", ["tests/test_docs.py"]),
        ("tests/test_upstream.py", ["tests/test_upstream.py"]),
        ("tests/policies/snapshots.py", ["tests/policies"]),
        ("tests/docs_blocks.py", ["tests/test_docs.py"]),
        ("tests/engines/harness.py", []),
        ("tests/containers/stack.py", []),
        ("tests/test_that_went.py", []),
        ("Makefile", []),
    ],
)
def test_a_files_tests_are_found_by_its_name(changed: str, found: list[str], root: Path) -> None:
    """By room, by module, by who imports it; a file that went is no test."""
    assert choose([changed], root) == found


def test_each_room_has_tests() -> None:
    """No room of the router is passed over because its tests have another name."""
    rooms = [path.name for path in (ROOT / "router").iterdir() if (path / "__init__.py").exists()]

    files = {"base": "backoff.py"}  # a test file for each of its modules
    chosen = {room: choose([f"router/{room}/{files.get(room, 'x.py')}"]) for room in rooms}
    assert [room for room in rooms if not chosen[room]] == []
