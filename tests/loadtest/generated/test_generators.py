"""What all generators have in common, and what each is for."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise

import pytest
from msgspec.structs import replace

from loadtest.agents import Profile, make_sessions
from loadtest.generated import GENERATORS, Agents, Chats, Generator, Mixed, Siblings
from loadtest.generated.agents import Pauses
from loadtest.traces import describe

SMALL: list[Generator] = [
    Agents(num_sessions=12, num_turns=6),
    Chats(num_sessions=30),
    Mixed(num_live=2, span_s=40.0, num_turns=4),
    Siblings(num_bursts=10, num_turns=2),
]


@pytest.mark.parametrize("generator", SMALL, ids=list(GENERATORS))
@pytest.mark.parametrize("block_size", [16, 512])
def test_workloads_are_sound(generator: Generator, block_size: int) -> None:
    """Ordered, keys unique, blocks as many as tokens need, `after` only what was before."""
    workload = replace(generator, block_size=block_size).workload()

    assert workload.block_size == block_size
    assert workload.turns[0].arrival_s == 0.0
    seen: dict[tuple[str, int], float] = {}
    for first, second in pairwise(workload.turns):
        assert first.arrival_s <= second.arrival_s
    for turn in workload.turns:
        assert len(turn.hash_ids) == -(-turn.num_input_tokens // block_size)
        assert turn.num_output_tokens >= 1
        assert turn.key not in seen
        assert turn.number == 0 or (turn.session_id, turn.number - 1) in seen
        assert all(seen[key] <= turn.arrival_s for key in turn.after)
        assert turn.wait_s >= 0.0
        seen[turn.key] = turn.arrival_s


@pytest.mark.parametrize("generator", SMALL, ids=list(GENERATORS))
def test_workloads_are_deterministic_by_seed(generator: Generator) -> None:
    """The same seed gives the same workload, another one another."""
    assert generator.workload() == generator.workload()
    assert generator.workload().turns != replace(generator, seed=1).workload().turns


@pytest.mark.parametrize("generator", SMALL, ids=list(GENERATORS))
def test_rates_are_of_poisson_processes(generator: Generator) -> None:
    """Starts are a second over `rate` apart on average; an infinite rate starts all at once."""
    if isinstance(generator, Mixed):
        return  # its agents do not start at a rate
    workload = replace(generator, rate=math.inf).workload()
    starts = {turn.arrival_s for turn in workload.turns if not turn.after}
    assert starts == {0.0}
    slow = replace(generator, rate=0.01).workload()
    arrivals = sorted({turn.arrival_s for turn in slow.turns if not turn.after})
    assert 40 < arrivals[-1] / (len(arrivals) - 1) < 250


def test_agents_are_as_published() -> None:
    """The figures of 610 traces of Codex, as far as they were published.

    Turns of a session: median 33 in the blog, 30 on the data set's card. Context at turn 30:
    80K. Input to output: 131 to 1. Possible hits: 94.2 % in the blog, 95.6 % by a reader's count.
    """
    workload = Agents(num_sessions=150).workload()
    figures = describe(workload, capacities=[])
    main = Counter(t.session_id for t in workload.turns if "." not in t.session_id)
    turns = sorted(main.values())
    first = [t.num_input_tokens for t in workload.turns if t.number == 0 and not t.after]

    assert 28 <= turns[len(turns) // 2] <= 33
    assert figures.late_context_tokens == pytest.approx(80_000, rel=0.12)
    assert figures.input_tokens.max <= 180_000
    assert figures.input_per_output == pytest.approx(131, rel=0.12)
    assert 0.942 <= figures.ideal_hit_ratio <= 0.965
    assert figures.wait_s is not None
    assert figures.wait_s.p50 == pytest.approx(5.2, rel=0.1)
    assert set(first) == {11_500 + 500 + 60}


def test_agents_without_text_are_those_with_text() -> None:
    """Turns, replies and waits are drawn as for the sessions that are really sent."""
    profile = Profile(num_sessions=5, num_turns=5, seed=3)
    workload = Agents(num_sessions=5, num_turns=5, seed=3).workload()

    for session in make_sessions(profile):
        turns = [turn for turn in workload.turns if turn.session_id == session.id]
        assert len(turns) == session.num_turns
        for turn in turns:
            sent = session.next_turn()
            assert sent is not None
            assert sent.body["max_tokens"] == turn.num_output_tokens
            if turn.number:
                assert sent.wait_s == turn.wait_s
            session.advance(None)


def test_replies_come_back_in_the_next_prompt() -> None:
    """A turn's prompt is the one before, the reply to it, and something new."""
    workload = Agents(num_sessions=3, num_turns=8, sub_agent_share=0.0).workload()

    for session in ("s0", "s1", "s2"):
        for first, second in pairwise([t for t in workload.turns if t.session_id == session]):
            assert second.num_input_tokens > first.num_input_tokens + first.num_output_tokens
            num_full = first.num_input_tokens // 512
            assert second.hash_ids[:num_full] == first.hash_ids[:num_full]
            assert second.after == (first.key,)


def test_sub_agents_start_from_their_parents_context() -> None:
    """At once, together, with its reply; their reports are what it goes on with."""
    workload = Agents(num_sessions=6, num_turns=6, sub_agent_share=1.0, block_size=16).workload()
    by_key = {turn.key: turn for turn in workload.turns}
    children = [turn for turn in workload.turns if turn.number == 0 and turn.after]
    assert len(children) == 6 * 3

    for child in children:
        ((parent_id, number),) = child.after
        parent, heir = by_key[parent_id, number], by_key[parent_id, number + 1]
        num_context_tokens = parent.num_input_tokens + parent.num_output_tokens
        num_shared = num_context_tokens // 16
        assert child.num_input_tokens > num_context_tokens
        assert (
            child.hash_ids[: parent.num_input_tokens // 16]
            == (parent.hash_ids[: parent.num_input_tokens // 16])
        )
        assert heir.hash_ids[:num_shared] == child.hash_ids[:num_shared]
        assert child.wait_s == heir.wait_s == 0.0
        last = max(n for name, n in by_key if name == child.session_id)
        assert (child.session_id, last) in heir.after
        assert (
            heir.num_input_tokens
            > num_context_tokens + by_key[child.session_id, last].num_output_tokens
        )


@pytest.mark.parametrize("name", ["s", "c"])
def test_mixed_has_constant_agents_and_chats_as_they_come(name: str) -> None:
    """Agents follow one another in lanes; chats follow nobody."""
    workload = Mixed(num_live=3, span_s=100.0, rate=0.2, num_turns=3).workload()
    starts = [t for t in workload.turns if t.number == 0 and t.session_id.startswith(name)]
    followers = [turn for turn in starts if turn.after]

    assert len(starts) - len(followers) == {"s": 3, "c": 20}[name]
    assert (len(followers) > 3) is (name == "s")


def test_live_agents_begin_anywhere_in_their_lives() -> None:
    """The mean context of the first prompts is far above that of a new session."""
    workload = Agents(num_live=40, span_s=1.0, sub_agent_share=0.0).workload()
    first = [turn.num_input_tokens for turn in workload.turns if not turn.after]

    assert len(first) == 40
    assert 40_000 < sum(first) / 40 < 70_000


@pytest.mark.parametrize(
    ("pauses", "median_s", "p90_s"), [("tools", 5.2, 23.6), ("short", 0.3, 9.8)]
)
def test_pauses_are_as_recorded(pauses: Pauses, median_s: float, p90_s: float) -> None:
    """The median and P90 of the waits between turns."""
    workload = Agents(num_sessions=200, pauses=pauses, sub_agent_share=0.0).workload()
    waits = sorted(turn.wait_s for turn in workload.turns if turn.after)

    assert waits[len(waits) // 2] == pytest.approx(median_s, rel=0.1)
    assert waits[9 * len(waits) // 10] == pytest.approx(p90_s, rel=0.15)


def test_chats_are_as_in_the_trace() -> None:
    """The figures of Mooncake's conversation trace, which the generator was fitted to."""
    workload = Chats(num_sessions=4_000).workload()
    turns = Counter(turn.session_id for turn in workload.turns)
    prompts = sorted(turn.num_input_tokens for turn in workload.turns)
    answers = sorted(turn.num_output_tokens for turn in workload.turns)
    waits = sorted(turn.wait_s for turn in workload.turns if turn.after)

    assert sum(num == 1 for num in turns.values()) / 4_000 == pytest.approx(0.694, abs=0.02)
    assert len(workload.turns) / 4_000 == pytest.approx(1.63, rel=0.05)
    assert prompts[len(prompts) // 2] == pytest.approx(6_909, rel=0.1)
    assert sum(prompts) / len(prompts) == pytest.approx(12_035, rel=0.15)
    assert answers[len(answers) // 2] == pytest.approx(350, rel=0.05)
    assert sum(answers) / len(answers) == pytest.approx(343, rel=0.05)
    assert waits[len(waits) // 2] == pytest.approx(112, rel=0.1)


def test_siblings_arrive_together_and_share_what_is_new() -> None:
    """Each burst has a prefix that no turn had before, and every sibling a task of its own."""
    workload = Siblings(num_bursts=4, num_siblings=3, block_size=16).workload()
    bursts: dict[float, list[tuple[int, ...]]] = {}
    for turn in workload.turns:
        bursts.setdefault(turn.arrival_s, []).append(turn.hash_ids)

    assert [len(burst) for burst in bursts.values()] == [3] * 4
    seen: set[int] = set()
    for burst in bursts.values():
        common = set.intersection(*map(set, burst))
        assert len(common) == 22_000 // 16
        assert len(common & seen) in (0, 2_000 // 16)
        assert len(set.union(*map(set, burst))) > len(common) + 3 * 5
        seen |= set().union(*map(set, burst))
