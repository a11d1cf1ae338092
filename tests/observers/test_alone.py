"""The path serves without its observers, and with any of them missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from router.assembly.observers import FOLDERS

ROOT: Final = Path(__file__).resolve().parents[2]
_LOADTEST: Final = ("emulator", "engine_model", "tiny_model", "text")

_ALONE: Final = """
import sys

# An editable installation would find in the checkout what is not in the copy.
sys.meta_path[:] = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "")]
"""

_SERVE: Final = """
import asyncio, re
import aiohttp, uvloop
from loadtest.emulator.emulator import Emulator
from loadtest.emulator.options import EmulatorOptions
from loadtest.engine_model.time_model import PRESETS
from router import config
from router.assembly.router import Router
from router.run import run

async def main():
    options = EmulatorOptions(time_model=PRESETS["instant"], reply_tokens=4)
    engines = [Emulator(options) for _ in range(2)]
    async with engines[0] as one, engines[1] as two:
        flags = {
            ("replicas",): [one.url, two.url], ("listen", "port"): 0, ("admin", "port"): 0,
            ("listen", "drain_grace_s"): 0.0, ("tokens", "encoder"): "tokenizers",
        }
        router, stop, urls = Router(config.load(flags=flags)), asyncio.Event(), []
        async with asyncio.TaskGroup() as tg:
            tg.create_task(run(router, stop, lambda *both: urls.extend(both)))
            found = router.fleet.members
            while not urls or len(found.replicas) < 2 or router.readiness.not_ready():
                await asyncio.sleep(0.02)
            texts, cached = ["hello there " * 80], []
            async with aiohttp.ClientSession() as client:
                for turn in range(3):
                    body = {
                        "model": "tiny", "max_tokens": 4, "stream": True,
                        "stream_options": {"include_usage": True},
                        "messages": [{"role": "user", "content": text} for text in texts],
                    }
                    url = f"{urls[0]}/v1/chat/completions"
                    async with client.post(url, json=body) as answer:
                        assert answer.status == 200, await answer.text()
                        stream = await answer.read()
                        parts = answer.headers["x-warmroute-cached"].split(";")
                    assert stream.endswith(b"data: [DONE]\\n\\n"), stream
                    predicted = sum(int(part.partition("=")[2]) for part in parts)
                    reported = int(re.search(rb'"cached_tokens":(\\d+)', stream).group(1))
                    assert predicted == reported, (turn, predicted, reported)
                    cached.append(reported)
                    texts += ["and more of it " * 40]
                    await asyncio.sleep(0.1)
            assert cached[0] == 0 < cached[1] < cached[2], cached
            stop.set()
    print("served", *sorted(router.observers))

uvloop.run(main())
"""

_CONFIGURE: Final = """
from router import config
from router.assembly.router import Router
from router.base.errors import ConfigError

for setting in (
    {("tracing", "endpoint"): "http://127.0.0.1:9"},
    {("early", "mode"): "off"},
    {("experiment",): {
        "name": "e", "variants": [{"name": name, "policy": "random"} for name in "ab"]
    }},
):
    try:
        Router(config.load(flags={("replicas",): ["http://127.0.0.1:9"], **setting}))
    except ConfigError as error:
        print(error.message)
"""

GONE: Final = (
    ("tracing", "tracing"),
    ("early", "early"),
    ("experiment", "experiments"),
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the code, with what is compiled of it."""
    folder = tmp_path_factory.mktemp("copy")
    for package in ("router", "policies", *(f"loadtest/{name}" for name in _LOADTEST)):
        shutil.copytree(ROOT / package, folder / package)
    for file in (ROOT / "loadtest").glob("*.py"):
        shutil.copy2(file, folder / "loadtest" / file.name)
    return folder


@contextmanager
def without(copy: Path, *names: str) -> Iterator[Path]:
    """Take some folders of `router/observers` out of the copy; "": all of it."""
    observers, aside = copy / "router/observers", copy / "aside"
    aside.mkdir()
    moves = [(observers / name, aside / (name or "all")) for name in names]
    for place, kept in moves:
        place.rename(kept)
    try:
        yield copy
    finally:
        for place, kept in moves:
            kept.rename(place)
        aside.rmdir()


def ran(folder: Path, script: str) -> str:
    """Run a script with the code in a folder; return what it wrote."""
    done = subprocess.run(
        [sys.executable, "-c", _ALONE + script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()


def test_the_path_serves_alone(copy: Path) -> None:
    """Streamed chats, with exact predictions, and no observer."""
    with without(copy, "") as folder:
        assert ran(folder, _SERVE) == "served"


@pytest.mark.parametrize("name", FOLDERS)
def test_an_observer_goes_with_its_folder(copy: Path, name: str) -> None:
    """All others stay."""
    others = sorted(set(FOLDERS) - {name})

    with without(copy, name) as folder:
        assert ran(folder, _SERVE) == " ".join(["served", *others])


def test_a_configuration_that_names_what_is_gone_is_refused(copy: Path) -> None:
    """The message names the section and the folder."""
    with without(copy, *(name for _, name in GONE)) as folder:
        said = ran(folder, _CONFIGURE).splitlines()

    for line, (field, name) in zip(said, GONE, strict=True):
        assert line.startswith(f"{field}: this warmroute has no router/observers/{name}")
