"""A headless Chromium, driven by its DevTools protocol: no library, no network but loopback."""

from __future__ import annotations

import asyncio
import atexit
import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import pytest

PATIENCE_S = 60.0

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests run as root in CI
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


def found_browser() -> str:
    """Find a Chromium, or skip the test; CI must have one."""
    for name in _NAMES:
        path = shutil.which(name)
        if path is not None:
            return path
    reason = f"none of {', '.join(_NAMES)} is installed"
    if os.environ.get("WARMROUTE_TEST_REQUIRE_SERVERS"):
        pytest.fail(reason)
    pytest.skip(reason)


class Page:
    """One tab. `errors` has what its console would show in red."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.errors: list[str] = []

    async def call(self, method: str, **params: Any) -> Any:
        """Call the protocol, and take the events that come meanwhile."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        await self._socket.send_str(json.dumps(message))
        while True:
            answer = json.loads(await self._socket.receive_str())
            self._see(answer)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _see(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    async def hurry(self, factor: int) -> None:
        """Have time pass faster for the pages that are opened from now on."""
        source = f"""(() => {{
          const now = Date.now, begun = now(), repeat = setInterval;
          Date.now = () => begun + {factor} * (now() - begun);
          window.setInterval = (action, ms) => repeat(action, ms / {factor});
        }})()"""
        await self.call("Page.addScriptToEvaluateOnNewDocument", source=source)

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def evaluate(self, script: str) -> Any:
        """Return the value of an expression; a promise is awaited."""
        answer = await self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        details = answer.get("exceptionDetails")
        assert details is None, f"{script}: {details}"
        return answer["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until an expression is true."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    if await self.evaluate(script):
                        return
                    await asyncio.sleep(0.05)
        except TimeoutError:
            shown = await self.text("body")
            raise AssertionError(f"never: {script}\n{self.errors}\n{shown}") from None

    async def text(self, selector: str) -> str:
        """Return the visible lines of an element; "" if there is none."""
        name = json.dumps(selector)
        text = await self.evaluate(f"document.querySelector({name})?.innerText ?? ''")
        return "\n".join(line.strip() for line in text.splitlines() if line.strip())

    async def press(self, key: str, code: int, text: str = "") -> None:
        """Press a key where the focus is."""
        fields = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **fields)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **fields)

    async def write(self, text: str) -> None:
        """Type a text where the focus is."""
        await self.call("Input.insertText", text=text)

    async def look(self, *, width: int = 1280, height: int = 900, is_dark: bool = False) -> None:
        """Choose the size of the screen, and its colours."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self) -> bytes:
        """Return what is on the screen, as PNG."""
        answer = await self.call("Page.captureScreenshot", format="png")
        return base64.b64decode(answer["data"])


@asynccontextmanager
async def browsing() -> AsyncIterator[Page]:
    """Open an empty tab in this process's browser, and close it at the end."""
    async with aiohttp.ClientSession(f"http://127.0.0.1:{_port()}") as client:
        async with client.put("/json/new?about:blank") as answer:
            tab = await answer.json(content_type=None)
        try:
            async with client.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=1 << 28) as way:
                page = Page(way)
                for area in ("Page", "Runtime", "Log"):
                    await page.call(f"{area}.enable")
                yield page
        finally:
            async with client.get(f"/json/close/{tab['id']}"):
                pass


@cache
def _port() -> int:
    """Start a browser, which ends with this process; return the port of its protocol."""
    profile = Path(tempfile.mkdtemp())
    process = subprocess.Popen(
        [found_browser(), *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    def end() -> None:
        process.kill()
        process.wait()
        shutil.rmtree(profile, ignore_errors=True)

    atexit.register(end)
    deadline_s = time.monotonic() + PATIENCE_S
    port_file = profile / "DevToolsActivePort"
    while time.monotonic() < deadline_s:
        lines = port_file.read_text().splitlines() if port_file.exists() else []
        if lines:
            return int(lines[0])
        time.sleep(0.02)
    raise TimeoutError("the browser does not start")
