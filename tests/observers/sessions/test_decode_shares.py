"""Each answer's share of the time that its replica decodes, on a clock of the test."""

from __future__ import annotations

from typing import Any

import pytest

from policies import create
from policies.view import (
    NOTHING_HELD,
    CandidateId,
    CostModel,
    Decision,
    ReplicaView,
    RequestView,
    Snapshot,
)
from router.observers.sessions.decode_shares import DecodeShare, DecodeShares
from router.records.outcome import Outcome
from router.replicas.cost_fit import Work
from router.replicas.ledger import Booking, Lease
from router.replicas.replica import Candidate, Replica
from router.request.plan import Placement, Plan

ID = CandidateId("r1")
COST = CostModel(base_ms=50.0, ms_per_token=1.0, ms_per_mtoken2=0.0)
PROMPT: Any = None  # it is not looked at


class Played:
    """Requests at one candidate, on a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.num_elsewhere = 0
        self.shares = DecodeShares(lambda _: self.num_elsewhere, lambda: self.now_s)

    def begin(self, num_tokens: int = 0, *, streams: bool = True) -> Placement:
        """Send a prompt with so many tokens to compute, each a millisecond."""
        view = ReplicaView(id=ID, cost=COST)
        snapshot = Snapshot(
            now_s=0.0, number=0, seed=0, request=RequestView(num_tokens=1), replicas=(view,)
        )
        candidate = Candidate(id=ID, replica=Replica(name="r1", url="http://127.0.0.1:9"))
        lease = Lease(
            number=1,
            candidate=ID,
            booking=Booking(num_uncached_tokens=num_tokens, num_cached_tokens=0, streams=streams),
            begun_s=self.now_s,
            num_mtoken2=0.0,
            work=Work(num_tokens=0, num_mtoken2=0, num_running=0, num_fetched_tokens=0),
            predicted_ms=0.0,
        )
        placement = Placement(
            plan=Plan(
                candidate=candidate,
                view=view,
                decision=Decision(candidate=ID, reason=""),
                snapshot=snapshot,
                policy=create("random"),
            ),
            candidate=candidate,
            replica="r1",
            predicted=NOTHING_HELD,
            lease=lease,
            claim=None,
            state="exact",
            placed_s=self.now_s,
        )
        self.shares.leased(PROMPT, placement)
        return placement

    def first_token(self, placement: Placement) -> None:
        self.shares.first_token(placement, self.now_s)

    def end(self, placement: Placement) -> float:
        """End a request; return its share in seconds."""
        self.shares.released(placement, Outcome.OK)
        share: DecodeShare = placement.slots[self.shares]
        return share.decode_s


@pytest.fixture
def played() -> Played:
    return Played()


def test_an_answer_alone_has_all_the_time(played: Played) -> None:
    """From its first token on: until then its prompt was computed."""
    request = played.begin(2_000)
    played.now_s += 3.0
    played.first_token(request)
    played.now_s += 5.0

    assert played.end(request) == pytest.approx(5.0)
    assert len(played.shares) == 0


def test_answers_share_each_second_equally(played: Played) -> None:
    """And together they get what has passed, not a multiple of it."""
    requests = []
    for _ in range(4):
        requests.append(played.begin())
        played.first_token(requests[-1])
        played.now_s += 1.0
    shares = [played.end(each) for each in requests]

    assert shares[0] == pytest.approx(1 + 1 / 2 + 1 / 3 + 1 / 4)
    assert shares[3] == pytest.approx(1 / 4)
    assert sum(shares) == pytest.approx(4.0)


def test_the_time_of_prompts_is_not_divided_among_answers(played: Played) -> None:
    """A prompt of two seconds comes while an answer is decoded for ten."""
    answer = played.begin()
    played.first_token(answer)
    played.now_s += 4.0
    prompt = played.begin(2_000)
    played.now_s += 2.5
    played.first_token(prompt)
    played.now_s += 3.5
    both = played.end(answer), played.end(prompt)

    assert both == pytest.approx((4.0 + 0.5 + 1.75, 1.75))
    assert sum(both) + 2.0 == pytest.approx(10.0)


def test_a_prompt_that_was_predicted_too_slow_takes_nothing_later(played: Played) -> None:
    request = played.begin(60_000)
    played.now_s += 1.0
    played.first_token(request)
    played.now_s += 2.0

    assert played.end(request) == pytest.approx(2.0)


def test_an_answer_that_is_not_streamed_begins_behind_its_prompt(played: Played) -> None:
    request = played.begin(2_000, streams=False)
    played.now_s += 5.0

    assert played.end(request) == pytest.approx(3.0)


def test_a_request_without_a_first_token_takes_no_time_of_answers(played: Played) -> None:
    answer, failed = played.begin(), played.begin(9_000)
    played.first_token(answer)
    played.now_s += 1.0
    nothing = played.end(failed)
    played.now_s += 1.0

    assert nothing == 0.0
    assert played.end(answer) == pytest.approx(1.0)  # the second before was the prompt's


def test_answers_of_other_routers_have_their_part(played: Played) -> None:
    played.num_elsewhere = 4
    request = played.begin()
    played.first_token(request)
    played.now_s += 4.0

    assert played.end(request) == pytest.approx(1.0)


def test_what_comes_twice_or_late_changes_nothing(played: Played) -> None:
    request = played.begin()
    played.first_token(request)
    played.now_s += 1.0
    played.first_token(request)
    share = played.end(request)
    played.now_s += 1.0
    played.first_token(request)

    assert share == pytest.approx(1.0)
    assert played.end(request) == pytest.approx(1.0)
    assert len(played.shares) == 0
