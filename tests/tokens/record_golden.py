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
from array import array
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tests.tokens.corpus import chat_bodies, completion_bodies

HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "loadtest" / "tiny_model"
GOLDEN = HERE / "golden"
SEED, COUNT = 1, 600
TEMPLATES: dict[str, Path | None] = {
    "model": None,
    **{path.stem: path for path in sorted((HERE / "templates").glob("*.jinja"))},
}


def fingerprint(ids: list[int]) -> str:
    """Name a list of token ids."""
    return f"{len(ids)}:{blake2b(array('I', ids).tobytes(), digest_size=8).hexdigest()}"


def record(seed: int = SEED, count: int = COUNT) -> dict[str, list[str | None]]:
    """Ask vLLM, template by template; completions under their own name."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.renderers.chat_utils import load_chat_template
    from vllm.renderers.online_renderer import OnlineRenderer
    from vllm.renderers.registry import renderer_from_config

    arguments = EngineArgs(model=str(MODEL), load_format="dummy", enforce_eager=True, block_size=32)
    config = arguments.create_engine_config()
    renderer = renderer_from_config(config)

    def online(template: Path | None) -> OnlineRenderer:
        return OnlineRenderer(
            config.model_config,
            renderer,
            request_logger=None,
            chat_template=load_chat_template(template),
            chat_template_content_format="auto",
            enable_auto_tools=True,
            tool_parser="hermes",
        )

    async def chat(engine: OnlineRenderer, body: dict[str, Any]) -> str | None:
        try:
            answer = await engine.render_chat(ChatCompletionRequest.model_validate(body))
            return fingerprint(answer[1][0]["prompt_token_ids"])
        except Exception:
            return None

    async def completion(engine: OnlineRenderer, body: dict[str, Any]) -> str | None:
        try:
            answer = await engine.render_completion(CompletionRequest.model_validate(body))
            return fingerprint(answer[0]["prompt_token_ids"])
        except Exception:
            return None

    async def everything() -> dict[str, list[str | None]]:
        found = {
            name: [await chat(engine, body) for body in chat_bodies(seed, count)]
            for name, engine in ((name, online(path)) for name, path in TEMPLATES.items())
        }
        engine = online(None)
        found["completions"] = [
            await completion(engine, body) for body in completion_bodies(seed, count)
        ]
        return found

    return asyncio.run(everything())


if __name__ == "__main__":
    seed, count, directory = SEED, COUNT, GOLDEN
    if len(sys.argv) == 4:
        seed, count, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    for name, entries in record(seed, count).items():
        text = json.dumps({"seed": seed, "entries": entries}, indent=0)
        (directory / f"{name}.json").write_text(text + "\n")
        print(name, sum(entry is not None for entry in entries), "of", len(entries))
    os._exit(0)  # vLLM's threads would linger
