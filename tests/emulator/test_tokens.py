"""Token ids equal transformers', whatever is remembered."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from loadtest.emulator.options import TINY_MODEL
from loadtest.emulator.tokens import (
    ChatTokenizer,
    Prompt,
    as_template_message,
    as_template_tool,
    chain,
)
from router.base.contracts import ExtraKeys, HashContract, block_key
from router.base.errors import BadRequest, TemplateFailed
from tests.effort import examples

TOKENIZER = ChatTokenizer(TINY_MODEL)
REFERENCE = AutoTokenizer.from_pretrained(str(TINY_MODEL))
PIECES = st.sampled_from(
    ["<|im_start|>", "<|im_end|>", "\n", " ", "  ", "word", " two", "é", "<think>", "<|im_"]
)


@given(st.lists(PIECES, max_size=30))
@settings(max_examples=examples(200))
def test_ids_equal_the_tokenizer_on_the_whole_text(pieces: list[str]) -> None:
    """Cutting at special tokens and remembering prefixes changes no id."""
    text = "".join(pieces)

    expected = REFERENCE.encode(text, add_special_tokens=False)

    assert TOKENIZER.encode(text).ids == expected
    assert TOKENIZER.encode(text).ids == expected


def test_only_new_text_is_tokenized() -> None:
    """The second turn encodes what it added, from the last boundary on."""
    tokenizer = ChatTokenizer(TINY_MODEL)
    first = [{"role": "user", "content": "x " * 1000}]
    tokenizer.encode(tokenizer.render(first))
    turn = [*first, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}]

    plan = tokenizer.plan(tokenizer.render(turn))

    assert plan.num_new_chars < 120
    assert sum(len(segment.ids) for segment in plan.known) > 1000


@pytest.mark.parametrize("salt", [None, "s"])
def test_the_chain_equals_hashing_the_prompt_at_once(salt: str | None) -> None:
    """Digests put together from remembered segments are those of the contract."""
    contract = HashContract(algorithm="sha256", block_size=4)
    extra = ExtraKeys(cache_salt=salt)
    text = TOKENIZER.render([{"role": "user", "content": "some text to hash " * 9}] * 3)
    prompt = TOKENIZER.encode(text)

    keys, last = contract.extend(None, prompt.ids, extra)

    for _ in range(2):
        digests = chain(prompt, contract, extra)
        assert [block_key(digest) for digest in digests] == keys
        assert digests[-1] == last
    assert chain(Prompt(prompt.ids), contract, extra) == digests


def test_memory_is_bounded() -> None:
    """The oldest segments go first; a forgotten prefix is encoded again, with the same ids."""
    tokenizer = ChatTokenizer(TINY_MODEL, max_known_tokens=40)
    texts = [f"<|im_start|>{'a b c ' * n}" for n in range(1, 9)]
    for text in texts * 2:
        tokenizer.encode(text)

    assert tokenizer.plan(texts[0]).known == []
    assert tokenizer.plan(texts[-1]).missing == []
    tokenizer.encode(texts[-1])
    assert tokenizer.encode(texts[0]).ids == REFERENCE.encode(texts[0])


def test_a_directory_is_read_once_until_it_changes(tmp_path: Path) -> None:
    """Replicas of one process share a tokenizer; one that is written again is read again."""
    directory = _changed_model(tmp_path, {})
    first, again = ChatTokenizer(directory), ChatTokenizer(directory)
    path = directory / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"normalizer": {"type": "NFC"}}))
    changed = ChatTokenizer(directory)

    assert again.tokenizer is first.tokenizer
    text = "<|im_start|>a<|im_end|>b"
    assert len(first.plan(text).missing) == 2
    assert len(changed.plan(text).missing) == 1


def test_a_tokenizer_that_looks_over_boundaries_is_used_whole(tmp_path: Path) -> None:
    """With a normalizer, or an added token that strips spaces, nothing is cut."""
    for change in (
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [_metaspace()]}},
        {"pre_tokenizer": None},
        {"strip": True},
    ):
        directory = _changed_model(tmp_path, change)
        tokenizer = ChatTokenizer(directory)
        text = "<|im_start|>a<|im_end|>b"
        cuts = len(tokenizer.plan(text).missing)
        assert cuts == (2 if change == {"pre_tokenizer": None} else 1)


def test_messages_are_shaped_as_vllm_shapes_them() -> None:
    """Parts are joined by line breaks, arguments decoded, reasoning doubled, the rest dropped."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    parts = [{"type": "text", "text": "a"}, "b", {"type": "refusal", "refusal": "c"}]

    shaped = [
        as_template_message(message)
        for message in (
            {"role": "user", "content": parts, "name": "n", "x": 1},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "r"},
            {"role": "tool", "content": "t", "tool_call_id": "c"},
        )
    ]

    assert shaped[0] == {"role": "user", "content": "a\nb\nc", "name": "n"}
    assert shaped[1]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert shaped[1]["reasoning"] == shaped[1]["reasoning_content"] == "r"
    assert shaped[2] == {"role": "tool", "content": "t", "tool_call_id": "c"}


@pytest.mark.parametrize("arguments", ["not json", "[1]", None, ""])
def test_arguments_that_are_no_object_become_an_empty_one(arguments: str | None) -> None:
    """A broken call in the history does not fail the conversation."""
    call = {"function": {"name": "f", "arguments": arguments}}

    shaped = as_template_message({"role": "assistant", "tool_calls": [call]})

    assert shaped["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    "message",
    [
        "text",
        {"content": "no role"},
        {"role": "user", "content": 1},
        {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
        {"role": "assistant", "tool_calls": [1]},
    ],
)
def test_messages_that_cannot_be_rendered_are_refused(message: Any) -> None:
    """Each is the client's fault and says so."""
    with pytest.raises(BadRequest):
        as_template_message(message)


def test_tools_keep_their_fields_in_the_engines_order() -> None:
    """Known fields come first, missing ones as null, others after."""
    tool = as_template_tool({"type": "function", "function": {"strict": True, "name": "f"}})

    assert list(tool["function"].items()) == [
        ("name", "f"),
        ("description", None),
        ("parameters", None),
        ("strict", True),
    ]
    with pytest.raises(BadRequest):
        as_template_tool({"type": "function"})


def test_what_the_template_refuses_is_the_clients_fault() -> None:
    """An unknown role raises in the template; no messages never reach it."""
    with pytest.raises(TemplateFailed, match="unknown role: weird"):
        TOKENIZER.render([{"role": "weird", "content": "x"}])
    with pytest.raises(BadRequest, match="empty conversation"):
        TOKENIZER.render([])


def _metaspace() -> dict[str, Any]:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True}


def _changed_model(tmp_path: Path, change: dict[str, Any]) -> Path:
    directory = tmp_path / str(len(list(tmp_path.iterdir())))
    shutil.copytree(TINY_MODEL, directory)
    path = directory / "tokenizer.json"
    state = json.loads(path.read_text())
    if change.pop("strip", False):
        state["added_tokens"][0]["lstrip"] = True
        config = directory / "tokenizer_config.json"
        settings_ = json.loads(config.read_text())
        settings_.pop("added_tokens_decoder", None)
        config.write_text(json.dumps(settings_))
    path.write_text(json.dumps(state | change))
    return directory
