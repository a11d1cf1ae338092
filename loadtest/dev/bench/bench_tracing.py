"""CPU that traces cost a request: off, on and not sampled, on and sampled.

Three routers get the same load in turns: 20 KB bodies, 16 in flight. All threads of a router count,
so the thread that makes and sends spans does, too. Each figure is the median over the rounds. A
collector takes the spans and forgets them.
"""

from __future__ import annotations

import asyncio
import re
import statistics
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

import uvloop

from loadtest.dev.bench.client import hammer
from loadtest.dev.bench.conversations import of_size
from loadtest.dev.bench.measures import Line
from loadtest.dev.bench.rig import Rig, start_rig
from loadtest.dev.bench.setting import Setting
from router.tokens import load_prompter

_IN_FLIGHT: Final = 16
_BODY_BYTES: Final = 20_000
_RATIOS: Final = {"off": None, "not sampled": "0", "sampled": "1"}


def run(setting: Setting) -> list[Line]:
    """Measure."""
    with _collector() as url:
        return uvloop.run(_run(setting, url))


async def _run(setting: Setting, url: str) -> list[Line]:
    prompter = load_prompter(str(setting.model_dir), local_files_only=True)
    bodies = [of_size(prompter, f"tracing-{n}", _BODY_BYTES) for n in range(_IN_FLIGHT)]
    rounds, seconds = setting.size(12, 1), setting.size(20, 3) / 10
    cost_us: dict[str, list[float]] = {what: [] for what in _RATIOS}
    num_sent = 0
    async with AsyncExitStack() as stack:
        rigs: dict[str, Rig] = {}
        for what, ratio in _RATIOS.items():
            flags = ("--tracing-endpoint", url, "--tracing-sample-ratio", ratio) if ratio else ()
            rigs[what] = await stack.enter_async_context(start_rig(setting, *flags))
        requests = [prepared.request() for prepared in bodies]
        for rig in rigs.values():  # the first request of a prompt costs more
            await hammer(rig.port, requests, seconds / 2)
        for _ in setting.track(range(rounds), "rounds"):
            for what, rig in rigs.items():
                before_s = rig.cpu_s()
                num = await hammer(rig.port, requests, seconds)
                await asyncio.sleep(setting.size(3, 0))  # until the last spans are sent
                cost_us[what].append((rig.cpu_s() - before_s) / num * 1e6)
                num_sent += num
        num_lost = await _num_lost(rigs["sampled"])
    off_us = statistics.median(cost_us["off"])
    return [
        Line(
            what=f"router CPU a request, 20 KB, traces {what}",
            unit="µs",
            num_samples=num_sent // len(_RATIOS),
            value=statistics.median(values),
            note=_note(what, statistics.median(values) - off_us, num_lost),
        )
        for what, values in cost_us.items()
    ]


def _note(what: str, more_us: float, num_lost: int) -> str:
    if what == "off":
        return ""
    return f"{more_us:+.0f} µs" + (f"; {num_lost:,} spans lost" if what == "sampled" else "")


async def _num_lost(rig: Rig) -> int:
    pattern = r'warmroute_spans_total{result="(?:failed|dropped)"} (\d+)'
    return sum(int(number) for number in re.findall(pattern, await rig.metrics()))


@contextmanager
def _collector() -> Iterator[str]:
    """Run a collector that takes everything."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, name="collector")
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
