"""Mistral's own tokenizer in front of a real engine: an agent's turns, predicted as reported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engines.harness import BLOCK_SIZE, Engine, Router, all_up, wait_until
from tests.tokens.mistral_models import build_model

TOOL = {
    "type": "function",
    "function": {"name": "shell", "description": "Runs it.", "parameters": {"type": "object"}},
}


@pytest.fixture(scope="module")
def mistral(log_dir: Path) -> Iterator[Router]:
    """Run a router in front of an engine in Mistral's mode."""
    model = build_model("mistral-tekken-v13", log_dir)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": 9000}))
    options = ("--model", str(model), "--tokenizer-mode", "mistral")
    engine = Engine("r1", log_dir, options=options)
    with all_up((engine,)):
        settings = {
            "replicas": [{"url": engine.url}],
            "tokens": {"tokenizer_modes": {"tiny": "mistral"}},
        }
        with Router((engine,), log_dir, config=settings) as router:
            yield router


def test_turns_are_predicted(mistral: Router) -> None:
    """Each turn reuses all of the one before, its calls and their results included."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You run commands. " * 20},
        {"role": "user", "content": "List the files, then say what they are. " * 10},
    ]
    before = 0
    for number in range(5):
        body = {"model": "tiny", "messages": messages, "tools": [TOOL], "max_tokens": 1}
        answer = mistral.chat(body)
        assert answer.status_code == 200, answer.text
        usage = answer.json()["usage"]
        reported = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        explained = mistral.explain(body)

        assert explained["way"] == "local"
        assert len(explained["token_ids"]) == usage["prompt_tokens"]
        assert answer.headers["x-warmroute-cached"].startswith(f"gpu={reported};")
        assert reported >= before - before % BLOCK_SIZE - BLOCK_SIZE
        settled = (usage["prompt_tokens"] - 1) // BLOCK_SIZE * BLOCK_SIZE
        sent = dict(body)
        wait_until(
            lambda sent=sent, settled=settled: mistral.num_known_tokens(sent)["r1"] == settled,
            60,
            f"{settled} tokens to be known",
        )
        before = usage["prompt_tokens"]
        call = {
            "id": f"chatcmpl-tool-abcdefgh{number}",
            "type": "function",
            "function": {"name": "shell", "arguments": json.dumps({"command": "ls " * 30})},
        }
        messages += [
            {"role": "assistant", "content": "I look.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "notes.txt\n" * 40},
        ]
    assert mistral.metric("warmroute_token_mismatches_total") == 0
    assert mistral.metric("warmroute_audited_total", result="exact") == 5
