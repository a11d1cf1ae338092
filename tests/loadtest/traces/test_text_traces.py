"""Messages: what their text comes to in tokens and blocks."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from loadtest.timing import Timing
from loadtest.traces import WorkloadError, read_workload
from loadtest.traces.blocks import Blocks, load_tokenizer
from tests.loadtest.traces.samples import messages, write

SYSTEM = "You are a coding agent. " * 200


def conversation(name: str, num_calls: int) -> list[dict[str, Any]]:
    """The requests of a session: each has the messages of the one before, and two more."""
    said = [SYSTEM + name]
    lines = []
    for call in range(num_calls):
        lines.append(messages(*said, session_id=name))
        said += [f"def reply_{call}(): pass", f"result {call} of {name}: " + "x = 1\n" * 50]
    return lines


def test_blocks_repeat_as_the_text_does(tmp_path: Path) -> None:
    """A call extends the blocks of the one before; sessions share what they begin with."""
    path = write(tmp_path / "t.jsonl", conversation("one", 4) + conversation("two", 2))

    workload = read_workload(path, block_size=16)

    by_key = {turn.key: turn for turn in workload.turns}
    for turn in workload.turns:
        assert len(turn.hash_ids) == -(-turn.num_input_tokens // 16)
    for first, second in pairwise([by_key["one", n] for n in range(4)]):
        num_full = first.num_input_tokens // 16 - 1  # the opening of the reply may fill one
        assert first.hash_ids[:num_full] == second.hash_ids[:num_full]
        assert second.num_input_tokens > first.num_input_tokens + 100
    common = set(by_key["one", 0].hash_ids) & set(by_key["two", 0].hash_ids)
    assert len(common) >= 200 * 5 // 16


def test_counts_are_the_tokenizers(tmp_path: Path) -> None:
    """Token counts are those of the ChatML text as a whole, opening of the reply included."""
    said = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What does\n  itertools.pairwise do?"},
    ]
    lines = [{"messages": said, "output_length": 9}]
    (turn,) = read_workload(write(tmp_path / "t.jsonl", lines)).turns

    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in said)
    whole = load_tokenizer(None).encode(text + "<|im_start|>assistant\n", add_special_tokens=False)
    assert abs(turn.num_input_tokens - len(whole.ids)) <= 2  # seams between role and content
    assert turn.num_output_tokens == 9
    assert turn.messages == tuple(said)


def test_messages_with_delays_and_tools(tmp_path: Path) -> None:
    """`delay` in ms, `pre_gap` in seconds and `input` for messages; tools come first."""
    tools = [{"type": "function", "function": {"name": "grep", "parameters": {}}}]
    user = {"role": "user", "content": "go on"}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {}}]}
    lines = [
        {"session_id": "a", "messages": [user], "output_length": 5, "tools": tools},
        {"session_id": "a", "messages": [user, call, user], "output_length": 5, "tools": tools,
         "delay": 1500},
        {"session_id": "a", "input": [user], "output_length": 5, "pre_gap": 0.25, "model": "m"},
        {"input": [user], "output_length": 5},
    ]  # fmt: skip
    path = write(tmp_path / "t.jsonl", lines)
    by_key = {turn.key: turn for turn in read_workload(path, block_size=4).turns}

    first, second, third = (by_key["a", n] for n in range(3))
    assert (second.wait_s, third.wait_s) == (1.5, 0.25)
    assert first.tools == tuple(tools)
    assert first.hash_ids[:4] == second.hash_ids[:4]
    assert not set(first.hash_ids) & set(third.hash_ids)
    assert second.num_input_tokens > first.num_input_tokens + 10
    assert by_key["m3", 0].hash_ids == third.hash_ids
    assert first.messages is not None
    assert second.messages is not None
    assert first.messages[0] is second.messages[0]  # equal messages are kept once


def test_sessions_without_times_start_at_a_rate(tmp_path: Path) -> None:
    """A Poisson process, the same for the same seed."""
    path = write(tmp_path / "t.jsonl", [messages("hello", session_id=n) for n in range(200)])

    def starts(rate: float, seed: int) -> list[float]:
        timing = Timing(rate=rate, seed=seed)
        return [turn.arrival_s for turn in read_workload(path, timing=timing).turns]

    ours = starts(4.0, 1)
    assert ours == starts(4.0, 1) != starts(4.0, 2)
    assert ours[-1] == pytest.approx(50.0, rel=0.3)


def test_a_tokenizer_may_be_given(tmp_path: Path) -> None:
    """By file or directory; what is no tokenizer is refused with its path."""
    path = write(tmp_path / "t.jsonl", conversation("a", 1))
    directory = Path("loadtest/tiny_model")

    given = read_workload(path, tokenizer=directory)

    assert given == read_workload(path, tokenizer=directory / "tokenizer.json")
    assert given == read_workload(path)
    with pytest.raises(WorkloadError, match="no such file"):
        read_workload(path, tokenizer=tmp_path)
    with pytest.raises(WorkloadError, match=r"t.jsonl: not a tokenizer"):
        read_workload(path, tokenizer=path)


def test_names_of_prefixes_chain() -> None:
    """A different first block gives different names to all that follow."""
    blocks = Blocks(load_tokenizer(None), 8)
    tail = blocks.read({"role": "user", "content": "the same words in the end " * 4})[1]
    head, other = (blocks.read({"role": "user", "content": word * 6})[1] for word in (" a", " b"))
    assert len(head) == len(other)

    num_tokens, ids = blocks.name([head, tail])

    assert num_tokens == len(head) + len(tail) + blocks.name([])[0]
    assert not set(ids) & set(blocks.name([other, tail])[1])
    assert blocks.name([head, tail]) == (num_tokens, ids)
