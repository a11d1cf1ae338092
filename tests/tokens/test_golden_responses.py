"""Our token ids of Responses requests against those recorded from vLLM (record_responses.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given

from router.api.responses import parse_responses
from router.errors import ClientError
from router.tokens import NeedsEngine, Prompter, load_prompter
from tests.api.samples import bodies
from tests.tokens.corpus import written
from tests.tokens.corpus_responses import responses_bodies
from tests.tokens.record_golden import GOLDEN, TEMPLATES
from tests.tokens.record_responses import BOS, model_with_bos
from tests.tokens.vllm_routes import MODEL, fingerprint

_REFUSED = "refused"


def _ours(prompter: Prompter, body: bytes) -> str | None:
    """Return the fingerprint of our ids; None: only the engine can make them or refuse."""
    try:
        plan = prompter.plan_chat(parse_responses(orjson.loads(body)))
    except NeedsEngine:
        return None
    except ClientError:
        return _REFUSED
    return fingerprint(prompter.commit(plan, plan.encode()).ids())


@pytest.fixture(scope="module")
def prompters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Prompter]:
    made = {name: load_prompter(str(MODEL), chat_template=path) for name, path in TEMPLATES.items()}
    with_bos = model_with_bos(tmp_path_factory.mktemp("bos") / "model")
    return made | {BOS: load_prompter(str(with_bos), chat_template=None)}


@pytest.mark.parametrize("name", [*TEMPLATES, BOS])
def test_ids_are_the_engines(name: str, prompters: dict[str, Prompter]) -> None:
    """Requests that the engine accepts have its ids here, are seldom unknown, and never refused."""
    golden = json.loads((GOLDEN / f"responses_{name}.json").read_text())
    recorded = golden["entries"]
    bodies = written(responses_bodies, golden["seed"], len(recorded))

    ours = [_ours(prompters[name], body) for body in bodies]

    taken = [(mine, its) for mine, its in zip(ours, recorded, strict=True) if its is not None]
    assert [pair for pair in taken if pair[0] is not None and pair[0] != pair[1]] == []
    assert sum(mine is not None for mine, _ in taken) > 0.95 * len(taken)
    assert len(taken) > 0.8 * len(recorded)


def test_the_special_token_in_front_is_not_forgotten(tmp_path: Path) -> None:
    """A prompt of the Responses API begins with the tokenizer's special token, unlike a chat's."""
    prompter = load_prompter(str(model_with_bos(tmp_path / "model")), chat_template=None)
    plan = prompter.plan_chat(parse_responses({"input": "hi"}))

    assert prompter.commit(plan, plan.encode()).ids()[0] == 0


@given(bodies)
def test_any_json_has_tokens_or_none(prompters: dict[str, Prompter], body: dict[str, Any]) -> None:
    """Any body gives tokens, or one of the two errors that the data path expects."""
    try:
        prompters["dump"].plan_chat(parse_responses(body))
    except (NeedsEngine, ClientError):
        return
