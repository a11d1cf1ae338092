"""The model without weights says the same thing to the same prompt."""

from __future__ import annotations

import json

import pytest

from loadtest.emulator.options import TINY_MODEL
from loadtest.emulator.replies import Reply, ReplyRules, ReplyWriter, sample
from loadtest.emulator.tokens import ChatTokenizer

TOKENIZER = ChatTokenizer(TINY_MODEL)
WRITER = ReplyWriter(TOKENIZER, seed=1)
SCHEMA = {
    "name": "f",
    "parameters": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "mode": {"enum": ["r", "w"]},
            "lines": {"type": "array", "items": {"type": "integer"}},
            "deep": {"type": "object", "properties": {"flag": {"type": "boolean"}}},
            "none": {"type": "null"},
        },
        "required": ["path", "mode", "lines", "deep", "none", "unknown"],
    },
}


def call(*, max_tokens: int) -> Reply:
    dice = WRITER.dice([1], None)
    given = sample(SCHEMA["parameters"], dice)
    return WRITER.tool_call(dice, "f", given, ReplyRules(max_tokens=max_tokens))


def test_words_come_back_as_the_same_tokens() -> None:
    """A reply sent back in the next turn is token for token what was said."""
    reply = WRITER.words(WRITER.dice([1, 2], None), ReplyRules(max_tokens=200, ignore_eos=True))

    assert len(reply.ids) == 200
    assert TOKENIZER.encode_plain(reply.text()) == reply.ids
    assert reply.finish_reason == "length"


def test_the_same_prompt_gets_the_same_reply_and_another_seed_another() -> None:
    """Prompt and seeds decide, nothing else."""
    rules = ReplyRules(max_tokens=20)
    replies = [
        WRITER.words(WRITER.dice(prompt, seed), rules).ids
        for prompt, seed in (([1, 2], None), ([1, 2], None), ([1, 3], None), ([1, 2], 5))
    ]

    assert replies[0] == replies[1]
    assert len({tuple(ids) for ids in replies}) == 3


def test_a_reply_ends_by_itself_unless_asked_otherwise() -> None:
    """The natural length ends with an end-of-sequence token; limits and ignore_eos overrule it."""
    dice = WRITER.dice([1], None)

    natural = WRITER.words(dice, ReplyRules(max_tokens=50, natural_tokens=7))
    longer = WRITER.words(dice, ReplyRules(max_tokens=50, natural_tokens=7, min_tokens=9))

    assert (len(natural.ids), natural.ids[-1], natural.texts[-1]) == (8, TOKENIZER.eos_id, "")
    assert natural.finish_reason == "stop"
    assert len(longer.ids) == 10


def test_a_stop_string_ends_the_text_before_it() -> None:
    """What follows the stop string, and the string itself, is not said."""
    dice = WRITER.dice([1], None)
    whole = WRITER.words(dice, ReplyRules(max_tokens=9, ignore_eos=True)).text()
    stop = whole[10:14]

    cut = WRITER.words(
        WRITER.dice([1], None), ReplyRules(max_tokens=9, ignore_eos=True, stop=("zzzz", stop))
    )

    assert cut.text() == whole[: whole.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    uncut = WRITER.words(WRITER.dice([1], None), ReplyRules(max_tokens=9, stop=("zzzz",)))
    assert uncut.stop_reason is None


@pytest.mark.parametrize("text", ["hello, wörld ☃!", ""])
@pytest.mark.parametrize("ignore_eos", [False, True])
def test_an_echo_says_the_text_again(text: str, ignore_eos: bool) -> None:
    """The text, once and ended, or repeated up to the limit; cut characters come in one piece."""
    reply = WRITER.echo(text, ReplyRules(max_tokens=30, ignore_eos=ignore_eos))

    assert reply.text().startswith(text)
    if ignore_eos or not text:
        assert (len(reply.ids), reply.finish_reason) == (30, "length")
    else:
        assert (reply.text(), reply.finish_reason) == (text, "stop")


def test_a_tool_call_fits_its_schema() -> None:
    """Required arguments are there, each of its type; the tokens are the Hermes form."""
    reply = call(max_tokens=500)

    assert reply.tool_call is not None
    arguments = json.loads(reply.tool_call.arguments)
    assert list(arguments) == SCHEMA["parameters"]["required"]  # type: ignore[index]
    assert arguments["mode"] == "r"
    assert isinstance(arguments["lines"][0], int)
    assert isinstance(arguments["deep"]["flag"], bool)
    assert (arguments["none"], arguments["unknown"]) == (None, {})
    spoken = TOKENIZER.decode(reply.ids[:-1])
    assert spoken == (
        f'<tool_call>\n{{"name": "f", "arguments": {reply.tool_call.arguments}}}\n</tool_call>'
    )
    assert reply.text() == ""
    parts = [reply.arguments(number, number + 1) for number in range(len(reply.ids))]
    assert "".join(parts) == reply.arguments() == reply.tool_call.arguments


def test_a_tool_call_can_be_cut_by_its_length() -> None:
    """Within five tokens there is a name at most, and the reason says so."""
    reply = call(max_tokens=5)

    assert reply.finish_reason == "length"
    assert len(reply.ids) == 5
