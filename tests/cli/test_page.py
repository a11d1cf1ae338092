"""`warmroute page`: a link that opens the live page."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.cli.running import on_a_terminal, run
from tests.faults.stage import SECRET, Engines, on_stage


async def test_only_a_terminal_gets_the_token(tmp_path: Path) -> None:
    """A log, a pipe or a file gets the plain address."""
    token = tmp_path / "token"
    token.write_text(f"{SECRET}-token\n")
    async with Engines(1) as engines, on_stage(*engines, admin__token_file=token) as stage:
        command = ("page", "--admin", stage.admin_url, "--token-file", str(token))
        shown = await asyncio.to_thread(on_a_terminal, *command)
        piped = await asyncio.to_thread(run, *command)

    assert shown.strip() == f"{stage.admin_url}/#token={SECRET}-token"
    assert piped.output == f"{stage.admin_url}/\n"
