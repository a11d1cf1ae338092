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

from tests.tokens.corpus_responses import responses_bodies
from tests.tokens.record_golden import GOLDEN, TEMPLATES
from tests.tokens.vllm_routes import MODEL, Rendering

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


async def record(
    model: Path, templates: dict[str, Path | None], count: int
) -> dict[str, list[str | None]]:
    """Ask vLLM, template by template."""
    rendering = Rendering(model)
    found: dict[str, list[str | None]] = {}
    for name, path in templates.items():
        routes = rendering.routes(path)
        bodies = responses_bodies(SEED, count)
        found[name] = [await routes.entry("responses", body) for body in bodies]
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        if sys.argv[1:] == [BOS]:
            made = model_with_bos(Path(scratch) / "model")
            found = asyncio.run(record(made, {BOS: None}, 100))
        else:
            found = asyncio.run(record(MODEL, TEMPLATES, COUNT))
    for name, entries in found.items():
        text = json.dumps({"seed": SEED, "entries": entries}, indent=0)
        (GOLDEN / f"responses_{name}.json").write_text(text + "\n")
        print(name, sum(entry is not None for entry in entries), "of", len(entries))
    os._exit(0)  # vLLM's threads would linger
