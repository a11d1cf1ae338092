"""Record what vLLM makes of Responses requests: `python -m tests.tokens.record_responses`.

Where vLLM is; as record_golden.py, by the engine's Responses models and renderer. `bos` is the
model's own template with a tokenizer that begins every text with a special token.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.tokens.corpus_responses import responses_bodies
from tests.tokens.record_golden import GOLDEN, MODEL, TEMPLATES, fingerprint

SEED, COUNT = 1, 500
BOS = "bos"


def model_with_bos(directory: Path) -> Path:
    """Copy the model, with a tokenizer that puts `<|endoftext|>` before a text."""
    shutil.copytree(MODEL, directory, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            "<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}
        },
    }
    path.write_text(json.dumps(tokenizer))
    return directory


def record(model: Path, templates: dict[str, Path | None], count: int) -> dict[str, list[Any]]:
    """Ask vLLM, template by template."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.renderers.chat_utils import load_chat_template
    from vllm.renderers.online_renderer import OnlineRenderer
    from vllm.renderers.registry import renderer_from_config

    arguments = EngineArgs(model=str(model), load_format="dummy", enforce_eager=True, block_size=32)
    config = arguments.create_engine_config()
    renderer = renderer_from_config(config)

    async def ask(engine: OnlineRenderer, body: dict[str, Any]) -> str | None:
        try:
            answer = await engine.render_responses(ResponsesRequest.model_validate(body))
            return fingerprint(answer.engine_input["prompt_token_ids"])
        except Exception:
            return None

    async def everything() -> dict[str, list[Any]]:
        found = {}
        for name, path in templates.items():
            engine = OnlineRenderer(
                config.model_config,
                renderer,
                request_logger=None,
                chat_template=load_chat_template(path),
                chat_template_content_format="auto",
                enable_auto_tools=True,
                tool_parser="hermes",
            )
            found[name] = [await ask(engine, body) for body in responses_bodies(SEED, count)]
        return found

    return asyncio.run(everything())


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        if sys.argv[1:] == [BOS]:
            found = record(model_with_bos(Path(scratch) / "model"), {BOS: None}, 100)
        else:
            found = record(MODEL, TEMPLATES, COUNT)
    for name, entries in found.items():
        text = json.dumps({"seed": SEED, "entries": entries}, indent=0)
        (GOLDEN / f"responses_{name}.json").write_text(text + "\n")
        print(name, sum(entry is not None for entry in entries), "of", len(entries))
    os._exit(0)  # vLLM's threads would linger
