"""Nothing that we send goes through a proxy that the environment names."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest

from router.cli.admin import Admin
from tests.cli.running import beside, run
from tests.faults.stage import Engines, chat, on_stage

ROOT = Path(__file__).parent.parent
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy")
HTTPX = {"get", "post", "request", "stream", "Client", "AsyncClient"}


async def test_commands_go_past_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would get the admin token, and answer in the router's place."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        await stage.ask(chat("hello"))
        for name in PROXIES:
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        for name in ("NO_PROXY", "no_proxy"):
            monkeypatch.delenv(name, raising=False)
        for args in (("status",), ("replicas", "list"), ("why",)):
            result = await beside(stage, *args)
            assert result.exit_code == 0, result.output
        ports = ("--port", "0", "--admin-port", "0")
        result = await asyncio.to_thread(run, "check", "--replica", engines[0].url, *ports)
        assert result.exit_code == 0, result.output
        tail = Admin(stage.admin_url, None, as_json=False).lines("live")
        assert await asyncio.to_thread(next, tail)
        await asyncio.to_thread(tail.close)


@pytest.mark.parametrize("folder", ["router", "loadtest"])
def test_each_client_ignores_the_environment(folder: str) -> None:
    """aiohttp's sessions do by default; httpx and requests do not."""
    for file in sorted((ROOT / folder).rglob("*.py")):
        tree = ast.parse(file.read_text())
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for call in calls:
            name, where = ast.unparse(call.func), f"{file.relative_to(ROOT)}:{call.lineno}"
            given = {each.arg: ast.unparse(each.value) for each in call.keywords}
            if name.startswith("httpx.") and name.removeprefix("httpx.") in HTTPX:
                assert given.get("trust_env") == "False", where
            elif name == "aiohttp.ClientSession":
                assert given.get("trust_env", "False") == "False", where
            elif name == "requests.Session":
                assert "session.trust_env = False" in file.read_text(), where
            assert not name.startswith(("requests.get", "requests.post", "urllib.request.")), where
