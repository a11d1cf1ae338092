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
from typing import Any, NamedTuple

from tests.conversations import conversations
from tests.tokens.record_golden import HERE, MODEL, fingerprint

SEED, COUNT = 7, 150
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
    """Ask vLLM for the fingerprints, family by family; only where it is installed."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_SYSTEM_START_DATE"] = DATE.isoformat()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.renderers.chat_utils import load_chat_template
    from vllm.renderers.online_renderer import OnlineRenderer
    from vllm.renderers.registry import renderer_from_config

    def engine(shown: Family) -> OnlineRenderer:
        arguments = EngineArgs(
            model=str(MODEL),
            load_format="dummy",
            enforce_eager=True,
            block_size=32,
            tokenizer_mode="hf" if shown.is_harmony else shown.mode,
        )
        config = arguments.create_engine_config()
        made = OnlineRenderer(
            config.model_config,
            renderer_from_config(config),
            request_logger=None,
            chat_template=load_chat_template(shown.template),
            chat_template_content_format="auto",
            enable_auto_tools=True,
            tool_parser="hermes",
        )
        if shown.is_harmony:  # as for a model of the type gpt_oss
            made.use_harmony, made.parser = True, None
        return made

    async def chat(renderer: OnlineRenderer, body: dict[str, Any]) -> str | None:
        try:
            answer = await renderer.render_chat(ChatCompletionRequest.model_validate(body))
            return fingerprint(answer[1][0]["prompt_token_ids"])
        except Exception:
            return None

    async def everything() -> dict[str, list[str | None]]:
        found: dict[str, list[str | None]] = {}
        for name in names:
            renderer = engine(family(name))
            found[name] = [
                await chat(renderer, conversation.chat())
                for conversation in conversations(seed, count)
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
