"""`warmroute page`: a link that opens the live page."""

from __future__ import annotations

import asyncio
import os
import pty
import sys
from pathlib import Path

from tests.cli.running import run
from tests.faults.stage import SECRET, Engines, on_stage


async def on_a_terminal(*args: str) -> str:
    """Return what a command writes to a terminal."""
    ours, theirs = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "router.cli", *args), stdout=theirs
    )
    os.close(theirs)
    assert await process.wait() == 0
    text = os.read(ours, 4096).decode()
    os.close(ours)
    return text


async def test_only_a_terminal_gets_the_token(tmp_path: Path) -> None:
    """A log, a pipe or a file gets the plain address."""
    token = tmp_path / "token"
    token.write_text(f"{SECRET}-token\n")
    async with Engines(1) as engines, on_stage(*engines, admin__token_file=token) as stage:
        command = ("page", "--admin", stage.admin_url, "--token-file", str(token))
        shown = await on_a_terminal(*command)
        piped = await asyncio.to_thread(run, *command)

    assert shown.strip() == f"{stage.admin_url}/#token={SECRET}-token"
    assert piped.output == f"{stage.admin_url}/\n"


def test_without_a_router_there_is_no_link() -> None:
    result = run("page", "--admin", "http://127.0.0.1:9")

    assert result.exit_code == 1
    assert "is `warmroute serve` running" in result.output
