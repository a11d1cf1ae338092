"""Model families, and what vLLM makes of generated conversations for each of them.

`python -m tests.tokens.families NAME …`, where vLLM is installed, runs the engine's own request
models and renderers: the code behind its routes, without weights. It prints fingerprints of the
ids, or null if the engine refuses a conversation. `prove_families` compares them with ours.

Families differ in rendering. gpt-oss, Kimi and Mistral have their own tokenizers, all others the
tiny model's.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.conversations import conversations
from tests.tokens import kimi_models, mistral_models
from tests.tokens.mistral_models import VERSIONS, suited
from tests.tokens.vllm_routes import HERE, MODEL, Rendering

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

    @property
    def is_mistral(self) -> bool:
        return self.mode == "mistral"


ONLY_PROVEN = {
    name: Family("mistral") for name in ("mistral-v2", "mistral-tekken-v7", "mistral-nemo")
}
"""By `make prove`, not by every test run: they take long, or are much like others."""

FAMILIES = {
    "gpt-oss": Family("harmony"),
    "deepseek-v3.2": Family("deepseek_v32"),
    "deepseek-v4": Family("deepseek_v4"),
    "deepseek-v4.1": Family("deepseek_v41"),
    **{name: Family("mistral") for name in VERSIONS if name not in ONLY_PROVEN},
    "kimi-k2.5-tools": Family("hf", HERE / "templates/kimi/k2.5-tools.jinja"),
    **{
        path.stem: Family("hf", path)
        for path in sorted((HERE / "templates/families").glob("*.jinja"))
    },
}


def family(name: str) -> Family:
    """Return a family by its name, or the one whose template is the file of this name."""
    if name in ONLY_PROVEN:
        return ONLY_PROVEN[name]
    return FAMILIES[name] if name in FAMILIES else Family("hf", Path(name))


def model_of(name: str, into: Path) -> Path:
    """Return a family's model directory, which may be written to `into`."""
    if name in kimi_models.VERSIONS:
        return kimi_models.build_model(name, into)
    return mistral_models.build_model(name, into) if family(name).is_mistral else MODEL


def bodies(name: str, api: str, seed: int, count: int) -> Iterator[dict[str, Any]]:
    """Yield the requests of one API for a family."""
    for index, conversation in enumerate(conversations(seed, count)):
        yield getattr(suited(name, conversation, index), api)()


def record(names: list[str], seed: int, count: int) -> dict[str, list[str | None]]:
    """Ask vLLM for the fingerprints by "family API"; only where it is installed.

    `count` chats, and half as many by each of the other APIs.
    """
    os.environ["VLLM_SYSTEM_START_DATE"] = DATE.isoformat()

    async def everything() -> dict[str, list[str | None]]:
        found: dict[str, list[str | None]] = {}
        for name in names:
            shown = family(name)
            with tempfile.TemporaryDirectory() as into:
                mode = "hf" if shown.is_harmony else shown.mode
                rendering = Rendering(model_of(name, Path(into)), mode=mode)
            routes = rendering.routes(shown.template, is_harmony=shown.is_harmony)
            for api in APIS:
                found[f"{name} {api}"] = [
                    await routes.entry(api, body)
                    for body in bodies(name, api, seed, count // 2 if api != "chat" else count)
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
