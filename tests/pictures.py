"""Make the pictures and the recorded output of the docs: `python -m tests.pictures`.

Each says what it was made from, so that a test can tell that it is stale. Only the drawing of the
architecture is made by hand.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import random
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from click.testing import CliRunner
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from loadtest.demo import demo
from loadtest.emulator.emulator import Emulator
from loadtest.engine_model.time_model import TimeModel
from tests.faults.stage import Engines, Json, Stage, chat, on_stage, streamed, words
from tests.observers.live.browser import Page, browsing

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "docs" / "images"
PAGE = ROOT / "router" / "observers" / "live" / "page.html"
DEMO = ROOT / "docs" / "get-started" / "demo.md"
RECORDED = re.compile(
    r"<!-- recorded while `demo --short` gives (\w+) -->\n```text\n(.*?)```\n", re.DOTALL
)
NUM_AGENTS, SECONDS = 8, 150.0
_NUM_COLOURS = 256  # half of the bytes
SPEED = TimeModel(base_ms=8.0, ms_per_prefill_token=0.5)


def digest(content: bytes) -> str:
    """Return what tells two inputs apart."""
    return hashlib.sha256(content).hexdigest()[:16]


def demo_output(*args: str) -> str:
    """Run the demo, and return what it prints where there is no terminal."""
    with tempfile.TemporaryDirectory() as folder:
        answer = CliRunner().invoke(demo, [*args, "-o", folder])
    assert answer.exit_code == 0, answer.output
    lines = answer.stdout.replace(f"{folder}/", "demo-out/").splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines)


def record_demo() -> None:
    """Write the demo's output into its page."""
    short, whole = digest(demo_output("--short").encode()), demo_output()
    made = f"<!-- recorded while `demo --short` gives {short} -->\n```text\n{whole}```\n"
    text, number = RECORDED.subn(lambda _: made, DEMO.read_text())
    assert number == 1
    DEMO.write_text(text)


async def agent(stage: Stage, number: int, until_s: float) -> None:
    """Talk for a while: a growing history, pauses, in one case a clock in the system prompt."""
    loop, draw = asyncio.get_running_loop(), random.Random(number)
    history, turn = [words(number, 300)], 0
    await asyncio.sleep(draw.random() * 4)
    while loop.time() < until_s:
        body: Json = streamed(chat(*history))
        minute = turn if number == 2 else 0
        system = {"role": "system", "content": f"It is 12:{minute:02}. {words(70 + number, 200)}"}
        body["messages"] = [system, *body["messages"]]
        await stage.ask(body, headers={"X-Session-ID": f"agent-{number}"})
        history += ["done", words(1000 * number + turn, draw.randrange(20, 120))]
        turn += 1
        if len(history) > 24:
            history = [words(500 + number + turn, 200)]  # compacted
        await asyncio.sleep(draw.uniform(1.0, 5.0))


async def disturb(stage: Stage, engines: Sequence[Emulator]) -> None:
    """Drain one replica for a while; another one loses its cache."""
    await asyncio.sleep(0.35 * SECONDS)
    await stage.admin("/admin/replicas/r1/drain", {"draining": True})
    await asyncio.sleep(0.15 * SECONDS)
    await stage.admin("/admin/replicas/r1/drain", {"draining": False})
    engines[1].replica.reset_prefix_cache(preempt=False)


async def take(page: Page, name: str) -> None:
    """Write what is on the screen."""
    picture = Image.open(io.BytesIO(await page.picture())).convert("RGB")
    source = PngInfo()
    source.add_text("source", digest(PAGE.read_bytes()))
    few = picture.quantize(_NUM_COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(IMAGES / name, optimize=True, pnginfo=source)


async def take_page() -> None:
    """Have agents talk, and look at the page meanwhile."""
    settings = {"queue__mode": "on"}
    async with (
        Engines(3, time_model=SPEED, num_gpu_blocks=800, reply_tokens=12) as engines,
        on_stage(*engines, is_idle=False, **settings) as stage,
        browsing() as page,
    ):
        await page.look(height=1180)
        await page.open(stage.admin_url)
        until_s = asyncio.get_running_loop().time() + SECONDS
        async with asyncio.TaskGroup() as tg:
            for number in range(NUM_AGENTS):
                tg.create_task(agent(stage, number, until_s))
            tg.create_task(disturb(stage, engines))
            await asyncio.sleep(0.9 * SECONDS)
            await take(page, "page.png")
            await page.look(height=1180, is_dark=True)
            await page.evaluate("document.querySelector('#h-sessions').scrollIntoView()")
            await page.evaluate("document.querySelector('#sessions button').click()")
            await page.until("document.querySelectorAll('#session tbody tr').length > 3")
            await take(page, "page-dark.png")
            await page.evaluate("document.getElementById('session').close()")
            await page.look(width=390, height=844)
            await page.evaluate("scrollTo(0, 0)")
            await take(page, "page-phone.png")
        assert page.errors == []


if __name__ == "__main__":
    asyncio.run(take_page())
    record_demo()
