"""Model families, and what vLLM makes of generated conversations for each of them.

`python -m tests.tokens.families NAME …`, where vLLM is installed, runs the engine's own request
models and renderers (the code behind its routes, no weights) and prints fingerprints of the ids,
null where the engine refuses a conversation. `prove_families` compares them with ours.

All families use the tiny model's tokenizer, gpt-oss its own: what differs is the rendering.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
from pathlib import Path
from typing import NamedTuple

from tests.conversations import conversations
from tests.tokens.vllm_routes import HERE, Rendering

SEED, COUNT = 7, 150
APIS = ("chat", "messages", "responses")
DATE = datetime.date(2025, 6, 28)


class Family(NamedTuple):
    """How the engine renders a family.

    mode: `--tokenizer-mode`.
    template: `--chat-template`; None: the model's, or none is used.
    """

    mode: str
    template: Path | None = None

    @property
    def is_harmony(self) -> bool:
        return self.mode == "harmony"


FAMILIES = {
    "gpt-oss": Family("harmony"),
    "deepseek-v3.2": Family("deepseek_v32"),
    "deepseek-v4": Family("deepseek_v4"),
    **{
        path.stem: Family("hf", path)
        for path in sorted((HERE / "templates/families").glob("*.jinja"))
    },
}


def family(name: str) -> Family:
    """Return a family by its name, or the one whose template is the file of this name."""
    return FAMILIES[name] if name in FAMILIES else Family("hf", Path(name))


def record(names: list[str], seed: int, count: int) -> dict[str, list[str | None]]:
    """Ask vLLM for the fingerprints by "family API"; only where it is installed.

    `count` chats, and half as many by each of the other APIs.
    """
    os.environ["VLLM_SYSTEM_START_DATE"] = DATE.isoformat()

    async def everything() -> dict[str, list[str | None]]:
        found: dict[str, list[str | None]] = {}
        for name in names:
            shown = family(name)
            rendering = Rendering(mode="hf" if shown.is_harmony else shown.mode)
            routes = rendering.routes(shown.template, is_harmony=shown.is_harmony)
            for api in APIS:
                found[f"{name} {api}"] = [
                    await routes.entry(api, getattr(conversation, api)())
                    for conversation in conversations(seed, count // 2 if api != "chat" else count)
                ]
        return found

    return asyncio.run(everything())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*", default=sorted(FAMILIES))
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=COUNT)
    given = parser.parse_intermixed_args()
    print(json.dumps(record(given.families, given.seed, given.count)), flush=True)
    os._exit(0)  # vLLM's threads would linger


if __name__ == "__main__":
    main()
