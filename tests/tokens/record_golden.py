"""Record what vLLM makes of the corpus: `python -m tests.tokens.record_golden`, where vLLM is.

Runs the engine's own request models and renderer (the code behind its routes) without weights, and
writes golden/*.json: per template a list, in the corpus's order, of "<tokens>:<BLAKE2b-64 of the
ids>", or null where the engine refuses the request.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from tests.tokens.corpus import chat_bodies, completion_bodies
from tests.tokens.vllm_routes import HERE, Rendering

GOLDEN = HERE / "golden"
SEED, COUNT = 1, 600
TEMPLATES: dict[str, Path | None] = {
    "model": None,
    **{path.stem: path for path in sorted((HERE / "templates").glob("*.jinja"))},
}


async def record(seed: int = SEED, count: int = COUNT) -> dict[str, list[str | None]]:
    """Ask vLLM, template by template; completions under their own name."""
    rendering = Rendering()
    found: dict[str, list[str | None]] = {}
    for name, path in TEMPLATES.items():
        routes = rendering.routes(path)
        found[name] = [await routes.entry("chat", body) for body in chat_bodies(seed, count)]
    routes = rendering.routes(None)
    found["completions"] = [
        await routes.entry("completion", body) for body in completion_bodies(seed, count)
    ]
    return found


if __name__ == "__main__":
    seed, count, directory = SEED, COUNT, GOLDEN
    if len(sys.argv) == 4:
        seed, count, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    for name, entries in asyncio.run(record(seed, count)).items():
        text = json.dumps({"seed": seed, "entries": entries}, indent=0)
        (directory / f"{name}.json").write_text(text + "\n")
        print(name, sum(entry is not None for entry in entries), "of", len(entries))
    os._exit(0)  # vLLM's threads would linger
