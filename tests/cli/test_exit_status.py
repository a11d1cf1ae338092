"""Every command ends with the statuses that docs/reference/commands.md lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest.generated import Agents
from loadtest.traces.mooncake import write_trace
from router.cli.admin import Admin
from tests.cli.running import REPLICA, commands, run

NO_ADMIN = ("--admin", "http://127.0.0.1:9")
TRACE, BROKEN, MISSING = "trace.jsonl", "broken", "missing"  # files

WELL = {
    "options": (),
    "policies": (),
    "schema": (),
    "tenant-key": ("acme",),
    "trace describe": (TRACE,),
    "trace convert": (TRACE, "--output", "copy.jsonl"),
    "simulate": ("--trace", TRACE, "--policies", "round_robin"),
    "estimate": (TRACE, "--replicas", "2", "--cache-tokens", "500000"),
}
BAD = {
    "admin-token": (),
    "check": (*REPLICA, "--port", "0", "--admin-port", "0", "--wait", "0.1"),
    "engine": ("sleep", "--all", *NO_ADMIN),
    "options": ("xyzzy",),
    "replicas list": NO_ADMIN,
    "replicas add": ("http://127.0.0.1:9", *NO_ADMIN),
    "replicas drain": ("r1", *NO_ADMIN),
    "replicas undrain": ("r1", *NO_ADMIN),
    "replicas remove": ("r1", *NO_ADMIN),
    "tail": NO_ADMIN,
    "why": NO_ADMIN,
}
WRONG = {
    "check": (),
    "compare": (BROKEN,),
    "estimate": (BROKEN, "--replicas", "2", "--cache-tokens", "500000"),
    "redecide": (BROKEN,),
    "replay": ("http://127.0.0.1:9", "--trace", BROKEN),
    "report": (BROKEN,),
    "serve": ("--config", MISSING),
    "simulate": ("--trace", BROKEN),
    "status": NO_ADMIN,
    "trace describe": (BROKEN,),
    "trace convert": (BROKEN, "--output", "copy.jsonl"),
}
OTHERS = {"demo", "emulate", "page"}  # of these only the command line can be wrong


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    write_trace(Agents(num_sessions=2, num_turns=2, rate=1.0).workload(), Path(TRACE))
    Path(BROKEN).write_text("{]\n")


@pytest.mark.parametrize(
    ("name", "args", "status"),
    [
        (name, args, status)
        for status, cases in enumerate((WELL, BAD, WRONG))
        for name, args in cases.items()
    ],
)
def test_a_command_ends_as_documented(name: str, args: tuple[str, ...], status: int) -> None:
    result = run(*name.split(), *args)

    assert result.exit_code == status, result.output
    assert status == 0 or result.output


def test_each_command_refuses_an_unknown_option() -> None:
    names = [name for name, _ in commands() if name not in {"replicas", "trace"}]

    assert set(names) == {*WELL, *BAD, *WRONG, *OTHERS}
    assert {name: run(*name.split(), "--xyzzy").exit_code for name in names} == dict.fromkeys(
        names, 2
    )


@pytest.mark.parametrize("name", ["status", "why", "replicas list"])
def test_an_interrupted_command_ends_with_130(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Admin, "ask", interrupted)

    assert run(*name.split()).exit_code == 130
