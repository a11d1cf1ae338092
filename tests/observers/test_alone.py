"""The path serves without its observers, and with any of them missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
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

flags = {("replicas",): ["http://127.0.0.1:9"], SETTING}
try:
    Router(config.load(flags=flags))
except ConfigError as error:
    print(error.message)
"""


def copied(folder: Path, left_out: Iterable[str]) -> Path:
    """Copy the code without some folders of `router/observers`; "": without all of it."""
    gone = {(ROOT / "router/observers" / name).resolve() for name in left_out}

    def ignore(place: str, names: list[str]) -> list[str]:
        return [
            name
            for name in names
            if name == "__pycache__" or (Path(place) / name).resolve() in gone
        ]

    for package in ("router", "policies", *(f"loadtest/{name}" for name in _LOADTEST)):
        shutil.copytree(ROOT / package, folder / package, ignore=ignore)
    shutil.copy(ROOT / "loadtest/__init__.py", folder / "loadtest/__init__.py")
    for file in (ROOT / "loadtest").glob("*.py"):
        shutil.copy(file, folder / "loadtest" / file.name)
    return folder


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


def test_the_path_serves_alone(tmp_path: Path) -> None:
    """Streamed chats, with exact predictions, and no observer."""
    assert ran(copied(tmp_path, [""]), _SERVE) == "served"


@pytest.mark.parametrize("name", FOLDERS)
def test_an_observer_goes_with_its_folder(tmp_path: Path, name: str) -> None:
    """All others stay."""
    others = sorted(set(FOLDERS) - {name})

    assert ran(copied(tmp_path, [name]), _SERVE) == " ".join(["served", *others])


@pytest.mark.parametrize(
    ("name", "setting", "field"),
    [
        ("tracing", '("tracing", "endpoint"): "http://127.0.0.1:9"', "tracing"),
        ("early", '("early", "mode"): "on"', "early"),
        ("shadows", '("shadow", "share"): 0.5', "shadow"),
    ],
)
def test_a_configuration_that_names_what_is_gone_is_refused(
    tmp_path: Path, name: str, setting: str, field: str
) -> None:
    """The message names the section and the folder."""
    said = ran(copied(tmp_path, [name]), _CONFIGURE.replace("SETTING", setting))

    assert said.startswith(f"{field}: this warmroute has no router/observers/{name}")
