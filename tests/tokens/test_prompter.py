"""Requests to tokens and block keys: exact whatever is remembered, however it was remembered."""

from __future__ import annotations

import functools
import random
from typing import Any
from unittest import mock

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from router.api.openai import parse_chat, parse_completion
from router.base.contracts import ExtraKeys, HashContract
from router.base.errors import TemplateFailed
from router.tokens import NeedsEngine, Prompter, Tokens, load_prompter, model_files, prompt_tree
from router.tokens.boundaries import ID_STRIDE
from router.tokens.encoder import TextEncoder
from router.tokens.templates import NoRenderer
from tests.effort import examples
from tests.tokens.corpus import text
from tests.tokens.record_golden import TEMPLATES
from tests.tokens.vllm_routes import MODEL

CONTRACT = HashContract(algorithm="sha256", block_size=16)
SALTED = ExtraKeys(cache_salt="pepper")


_files = functools.cache(model_files.load_tokenizer)


def _load(template: str = "agent", cache_tokens: int = 1_000_000) -> Prompter:
    with mock.patch.object(model_files, "load_tokenizer", _files):
        return load_prompter(
            str(MODEL), chat_template=TEMPLATES[template], cache_tokens=cache_tokens
        )


def _run(prompter: Prompter, body: dict[str, Any]) -> Tokens:
    if "messages" in body:
        plan = prompter.plan_chat(parse_chat(body))
    else:
        plan = prompter.plan_completion(parse_completion(body))
    return prompter.commit(plan, plan.encode())


def _fresh_keys(tokens: Tokens, contract: HashContract, extra: ExtraKeys) -> list[int]:
    keys, _ = contract.extend(None, tokens.ids(), extra)
    return list(keys)


class Agents:
    """A few conversations that grow, branch, are edited and start again, out of one seed."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._system = text(rng, 150)
        self._talks: list[list[dict[str, Any]]] = [[]]

    def next_body(self) -> dict[str, Any]:
        rng = self._rng
        talk = rng.choice(self._talks)
        step = rng.random()
        if not talk or step < 0.1:
            system = self._system + (text(rng, 3) if rng.random() < 0.5 else "")
            talk = [{"role": "system", "content": system}]
            self._talks.append(talk)
        elif step < 0.2:
            talk = [dict(message) for message in talk]  # a branch
            self._talks.append(talk)
        elif step < 0.3:
            message = rng.choice(talk)
            message["content"] = text(rng, rng.randrange(60))  # history rewritten
        elif step < 0.35:
            del talk[1:-1:2]
        self._say(talk)
        options = {"enable_thinking": rng.random() < 0.5} if rng.random() < 0.3 else {}
        return {"messages": talk, "chat_template_kwargs": options}

    def _say(self, talk: list[dict[str, Any]]) -> None:
        rng = self._rng
        talk.append({"role": "user", "content": text(rng, rng.randrange(5, 80))})
        for _ in range(rng.randrange(3)):
            reply = {"role": "assistant", "content": text(rng, rng.randrange(40))}
            talk.append(reply | {"reasoning": text(rng, rng.randrange(1, 40))})
            talk.append({"role": "tool", "content": text(rng, rng.randrange(200))})


@settings(max_examples=examples(25))
@given(seed=st.integers(0, 2**32), cache_tokens=st.sampled_from([0, 300, 3_000, 1_000_000]))
def test_incremental_is_full(seed: int, cache_tokens: int) -> None:
    """Over turns, edits, branches and evictions: ids as encoded whole, keys as hashed whole."""
    prompter = _load(cache_tokens=cache_tokens)
    agents = Agents(random.Random(seed))
    held: list[Tokens] = []

    for turn in range(12):
        body = agents.next_body()
        request = parse_chat(body)
        tokens = _run(prompter, body)

        assert prompter.reference.proves(request, tokens)
        extra = SALTED if turn % 3 == 0 else ExtraKeys()
        assert list(tokens.keys(CONTRACT, extra)) == _fresh_keys(tokens, CONTRACT, extra)
        assert tokens.num_tokens == len(tokens.ids())
        assert prompter.memory.size_bytes <= cache_tokens * 6 + 100_000  # chains are counted late
        held.append(tokens)
    for tokens in held:  # what was handed out stays right, evicted or not
        assert list(tokens.keys(CONTRACT)) == _fresh_keys(tokens, CONTRACT, ExtraKeys())


@settings(max_examples=examples(40))
@given(
    turns=st.lists(
        st.tuples(st.integers(0, 3 * ID_STRIDE), st.integers(0, 5000), st.booleans()), max_size=5
    )
)
def test_token_id_prompts(turns: list[tuple[int, int, bool]]) -> None:
    """Prompts of ids come out as they went in, with the keys of a chain from the start."""
    prompter = _load()
    ids: list[int] = []

    for keep, grow, salted in turns:
        ids = ids[:keep] + [(keep + index * 7) % 8192 for index in range(grow)]
        plan = prompter.plan_ids(ids)
        tokens = prompter.commit(plan, plan.encode())

        assert tokens.ids() == ids
        extra = SALTED if salted else ExtraKeys()
        assert list(tokens.keys(CONTRACT, extra)) == _fresh_keys(tokens, CONTRACT, extra)


def test_a_turn_encodes_what_it_added() -> None:
    """The next turn of a long conversation, and its sibling, start where they differ."""
    prompter = _load()
    rng = random.Random(1)
    talk = [{"role": "user", "content": text(rng, 4000)}]
    first = _run(prompter, {"messages": talk})

    talk += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": text(rng, 100)}]
    plan = prompter.plan_chat(parse_chat({"messages": talk}))
    second = prompter.commit(plan, plan.encode())

    assert first.num_new_tokens == first.num_tokens
    assert plan.num_new_chars < 0.1 * len(plan.data)
    assert second.num_new_tokens < 0.1 * second.num_tokens


@pytest.mark.parametrize("kind", ["chat", "text", "ids"])
def test_what_one_owner_sent_helps_no_other(kind: str) -> None:
    """Else the time saved would tell what others sent. The tokens are the same for all."""
    prompter = _load()
    rng = random.Random(1)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"a": text(rng, 20)}}}]

    def plan(owner: str) -> Any:
        if kind == "chat":
            messages = [{"role": "user", "content": text(random.Random(2), 500)}]
            request = parse_chat({"messages": messages, "tools": tools})
            return prompter.plan_chat(request, owner)
        if kind == "text":
            body = {"prompt": text(random.Random(2), 500)}
            return prompter.plan_completion(parse_completion(body), owner=owner)
        return prompter.plan_completion(parse_completion({"prompt": [1, 2, 3] * 500}), owner=owner)

    tokens = {}
    for owner in ("a", "", "b"):
        first = plan(owner)
        tokens[owner] = prompter.commit(first, first.encode())
        assert tokens[owner].num_new_tokens == tokens[owner].num_tokens
        assert plan(owner).walk.new == []

    assert tokens["a"].ids() == tokens[""].ids() == tokens["b"].ids()


@pytest.mark.parametrize("prompt", ["plain text " * 300, "", "<|im_start|>user\nhi<|im_end|>" * 99])
@pytest.mark.parametrize("kind", ["none", "ends", "odd"])
def test_special_tokens_around_completions(prompt: str, kind: str) -> None:
    """`add_special_tokens` gives what the tokenizer gives, however its post-processor does it."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    single = {"ends": "<|endoftext|> $A <think>", "odd": "$A <think> $A"}.get(kind)
    if single is not None:
        special = [("<|endoftext|>", 0), ("<think>", 8190)]
        tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=special)
    prompter = Prompter(TextEncoder(tokenizer), NoRenderer())

    for special in (True, False, True):
        body = {"prompt": prompt, "add_special_tokens": special}
        tokens = _run(prompter, body)

        assert tokens.ids() == tokenizer.encode(prompt, add_special_tokens=special).ids
        assert prompter.reference.proves(parse_completion(body), tokens)


def test_distrust_ends_local_tokenization() -> None:
    """After a mismatch texts are the engine's, ids are not: they may be its own answer."""
    prompter = _load()
    assert prompter.engine_only is None

    prompter.trust.observe_usage("r1", 10, 11, has_others=False, now_s=0.0)

    assert prompter.engine_only is not None
    with pytest.raises(NeedsEngine) as caught:
        _run(prompter, {"messages": [{"role": "user", "content": "hello"}]})
    assert caught.value.reason == "distrusted"
    assert _run(prompter, {"prompt": [1, 2]}).ids() == [1, 2]


def test_without_tokenizer() -> None:
    """A model that cannot be loaded still has block keys of token ids."""
    prompter = Prompter.missing("renderer mistral")

    assert prompter.engine_only == "renderer mistral"
    for body in ({"prompt": "text"}, {"messages": [{"role": "user", "content": "x"}]}):
        with pytest.raises(NeedsEngine, match="mistral"):
            _run(prompter, body)
    assert _run(prompter, {"prompt": [1, 2]}).ids() == [1, 2]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"prompt": None, "prompt_embeds": "AAAA"}, "field"),
        ({"prompt": "x", "suffix": "y"}, "field"),
        ({"prompt": "\ud800"}, "surrogate"),
        ({"prompt": "x", "truncate_prompt_tokens": 5}, "field"),
    ],
)
def test_completions_for_the_engine(body: dict[str, Any], reason: str) -> None:
    """What only the engine can do has a reason."""
    with pytest.raises(NeedsEngine) as caught:
        _run(_load(), body)

    assert caught.value.reason == reason


def test_template_errors_are_the_clients() -> None:
    """What the template refuses, the engine would refuse."""
    with pytest.raises(TemplateFailed, match="no role robot"):
        _run(_load(), {"messages": [{"role": "robot", "content": "x"}]})


def written_ids(tokens: Tokens) -> bytes:
    steps = tokens.json()
    try:
        while True:
            next(steps)
    except StopIteration as end:
        written: bytes = end.value
        return written


def test_long_prompts_are_written_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tasks run between them."""
    monkeypatch.setattr(prompt_tree, "JSON_STEP_IDS", 100)
    texts = ["one " * 300, "two " * 300]
    tokens = _run(_load(), {"messages": [{"role": "user", "content": each} for each in texts]})

    assert len(list(tokens.json())) == 2
    assert len(list(tokens.json())) == 0


def test_ids_are_written_as_json_once() -> None:
    """Whatever was written before, of whichever prompt; and what is remembered is counted."""
    prompter = _load()
    messages = [{"role": "user", "content": "one " * 300}]
    for content in ("two", "three " * 500, ""):
        tokens = _run(prompter, {"messages": messages})
        size_bytes = prompter.memory.size_bytes
        written = written_ids(tokens)

        assert orjson.loads(b"[" + written + b"]") == tokens.ids()
        assert prompter.memory.size_bytes > size_bytes
        assert written_ids(tokens) == written
        messages = [*messages, {"role": "assistant", "content": content}, messages[0]]
    tree = prompter.memory._tree
    assert tree.size_bytes == sum(s.size_bytes for s in tree.segments.values())


def test_owners_without_end_are_forgotten_in_time() -> None:
    """What they sent is found again all the same."""
    prompter = _load()
    request = parse_completion({"prompt": "hello"})
    for number in range(5000):
        plan = prompter.plan_completion(request, owner=f"o{number}")
        prompter.commit(plan, plan.encode())

    assert len(prompter.memory._roots) <= 4096
    assert prompter.plan_completion(request, owner="o1").walk.new == []
