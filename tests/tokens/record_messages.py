"""Record what vLLM makes of `messages_corpus`: `python -m tests.tokens.record_messages`.

As record_golden, with the engine's own conversion of `/v1/messages` in front of its renderer, and
what it tries out on each template. Writes golden/messages/*.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from tests.tokens.messages_corpus import messages_bodies
from tests.tokens.record_golden import GOLDEN
from tests.tokens.record_golden import TEMPLATES as CHAT_TEMPLATES
from tests.tokens.vllm_routes import HERE, Rendering

SEED, COUNT = 1, 600
TEMPLATES: dict[str, Path | None] = {
    **{name: CHAT_TEMPLATES[name] for name in ("model", "agent", "parts")},
    **{path.stem: path for path in sorted((HERE / "templates" / "messages").glob("*.jinja"))},
}
"""The chats' own `dump` is one with which an engine with this API does not start."""


async def record(seed: int = SEED, count: int = COUNT) -> dict[str, list[str | None]]:
    """Ask vLLM, template by template."""
    rendering = Rendering()
    found: dict[str, list[str | None]] = {}
    for name, path in TEMPLATES.items():
        routes = rendering.routes(path)
        bodies = messages_bodies(seed, count)
        found[name] = [await routes.entry("messages", body) for body in bodies]
    return found


if __name__ == "__main__":
    seed, count, directory = SEED, COUNT, GOLDEN / "messages"
    if len(sys.argv) == 4:
        seed, count, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    directory.mkdir(parents=True, exist_ok=True)
    for name, entries in asyncio.run(record(seed, count)).items():
        text = json.dumps({"seed": seed, "entries": entries}, indent=0)
        (directory / f"{name}.json").write_text(text + "\n")
        print(name, sum(entry is not None for entry in entries), "of", len(entries))
    os._exit(0)  # vLLM's threads would linger
