"""Sessions derived from shared blocks."""

from __future__ import annotations

from loadtest.traces import sessions_of
from loadtest.traces.request import Draft


def request(*hash_ids: int) -> Draft:
    return Draft(
        timestamp_ms=0.0, num_input_tokens=512, num_output_tokens=1, hash_ids=tuple(hash_ids)
    )


def test_sessions_are_joined_by_rare_blocks() -> None:
    """The shared system block joins no sessions; a conversation's own blocks do."""
    trace = [request(0, 1000 + n % 60, 2000 + n) for n in range(360)]

    sessions = sessions_of(trace)

    assert sessions == [n % 60 for n in range(360)]


def test_few_requests_may_all_be_one_conversation() -> None:
    """In a short trace even a block that all have may be one conversation's own."""
    trace = [request(0, n) for n in range(1, 48)]

    assert set(sessions_of(trace)) == {0}
    assert len(set(sessions_of([*trace, trace[0]]))) == 47
