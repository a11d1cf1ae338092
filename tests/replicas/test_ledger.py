from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import CandidateId, CostModel
from router.replicas.ledger import Booking, Foreign, Lease, Ledger
from tests.effort import examples
from tests.replicas.work import UNIT, book


def test_counts_waiting_and_decoding() -> None:
    ledger = Ledger()
    lease = book(ledger, 1, 0.0)
    book(ledger, 2, 0.0, tokens=50)

    assert (ledger.num_requests, ledger.num_waiting, ledger.num_queued_tokens) == (2, 2, 150)
    assert ledger.first_token(lease, 0.1)
    assert (ledger.num_requests, ledger.num_waiting, ledger.num_queued_tokens) == (2, 1, 50)
    assert ledger.end(lease, 0.2)
    assert (ledger.num_requests, ledger.num_waiting, ledger.num_queued_tokens) == (1, 1, 50)


def test_a_first_token_that_is_long_overdue_is_not_counted_on() -> None:
    ledger = Ledger()
    book(ledger, 1, 0.0)
    long = book(ledger, 2, 0.0, tokens=100_000)
    assert ledger.num_timely(30.0) == 2
    assert (ledger.num_timely(60.0), ledger.num_waiting) == (1, 2)
    assert ledger.num_timely(31.0 + 4e-3 * long.predicted_ms) == 0


def test_a_first_token_that_is_not_seen_is_not_counted_on() -> None:
    ledger = Ledger()
    book(ledger, 1, 0.0, tokens=100_000, streams=False)
    assert (ledger.num_timely(1.0), ledger.num_waiting) == (0, 1)
    book(ledger, 2, 0.0)
    assert ledger.num_timely(1.0) == 1


def test_queue_shrinks_as_the_head_is_computed() -> None:
    ledger = Ledger()
    book(ledger, 1, 0.0, tokens=100)
    book(ledger, 2, 0.0, tokens=30)

    assert ledger.queue_ms(UNIT, 0.0) == pytest.approx(130.0)
    assert ledger.queue_ms(UNIT, 0.06) == pytest.approx(70.0)


def test_the_pace_is_that_of_tokens_however_many_come_at_once() -> None:
    ledger = Ledger()
    assert ledger.queue_at_pace_ms() == 0.0
    for at_s in (0.0, 3600.0):
        leases = [book(ledger, int(at_s) + number, at_s, tokens=100) for number in range(5)]
        for lease in leases:
            ledger.first_token(lease, at_s + 1.0)
    book(ledger, 5, 4000.0, tokens=300)
    assert ledger.queue_at_pace_ms() == pytest.approx(600.0, rel=0.1)


def test_the_pace_is_of_first_tokens_that_are_seen_and_read_nothing() -> None:
    ledger = Ledger()
    booking = Booking(
        num_uncached_tokens=10, num_cached_tokens=90, num_fetched_tokens=90, is_from_pool=True
    )
    reads = ledger.admit(1, CandidateId("a"), booking, UNIT, Foreign(), 0.0)
    ledger.first_token(reads, 5.0)
    ledger.first_token(book(ledger, 2, 10.0, tokens=100, streams=False), 15.0)
    ledger.end(book(ledger, 3, 20.0, tokens=100), 25.0)
    waiting = book(ledger, 4, 30.0, tokens=100)
    assert ledger.queue_at_pace_ms() == 0.0

    ledger.first_token(waiting, 30.2)
    book(ledger, 5, 31.0, tokens=50)
    assert ledger.queue_at_pace_ms() == pytest.approx(100.0)


def test_a_late_head_keeps_a_remainder_that_grows() -> None:
    ledger = Ledger()
    book(ledger, 1, 0.0, tokens=100)

    assert ledger.queue_ms(UNIT, 0.1) == pytest.approx(10.0)
    assert ledger.queue_ms(UNIT, 20.0) == pytest.approx(2000.0)


def test_the_next_head_starts_when_the_one_before_is_done() -> None:
    ledger = Ledger()
    first = book(ledger, 1, 0.0, tokens=100)
    book(ledger, 2, 0.0, tokens=80)
    ledger.first_token(first, 0.1)

    assert ledger.queue_ms(UNIT, 0.1) == pytest.approx(80.0)
    assert ledger.queue_ms(UNIT, 0.13) == pytest.approx(50.0)


def test_overtaking_does_not_change_the_head() -> None:
    ledger = Ledger()
    book(ledger, 1, 0.0, tokens=100)
    short = book(ledger, 2, 0.0, tokens=10)
    ledger.first_token(short, 0.05)

    assert ledger.queue_ms(UNIT, 0.05) == pytest.approx(50.0)


def test_base_is_latency_not_queue() -> None:
    model = CostModel(base_ms=500.0, ms_per_token=1.0, ms_per_mtoken2=0.0)
    ledger = Ledger()
    lease = book(ledger, 1, 0.0, tokens=100, model=model)

    assert ledger.queue_ms(model, 0.0) == pytest.approx(100.0)
    assert lease.predicted_ms == pytest.approx(600.0)


def test_a_new_model_counts_at_once() -> None:
    model = CostModel(base_ms=0.0, ms_per_token=2.0, ms_per_mtoken2=1e6)
    ledger = Ledger()
    book(ledger, 1, 0.0, tokens=10, cached=5)

    assert ledger.queue_ms(UNIT, 0.0) == pytest.approx(10.0)
    assert ledger.queue_ms(model, 0.0) == pytest.approx(20.0 + 10 * (5 + 5))


def test_work_holds_everything_in_front_of_the_first_token() -> None:
    ledger = Ledger()
    ledger.first_token(book(ledger, 1, 0.0, tokens=7), 0.0)
    book(ledger, 2, 0.0, tokens=100)
    foreign = Foreign(num_requests=3, num_waiting=1, num_queued_tokens=20)
    lease = book(ledger, 3, 0.04, tokens=10, foreign=foreign)

    assert lease.work.num_tokens == pytest.approx(60 + 20 + 10)
    assert lease.work.num_running == 1 + 2
    assert lease.work.num_mtoken2 == pytest.approx((0.6 * 100 * 50 + 10 * 5) * 1e-6)
    assert lease.predicted_ms == pytest.approx(90.0)


def test_unseen_first_tokens_are_presumed_when_due() -> None:
    ledger = Ledger()
    whole = book(ledger, 1, 0.0, tokens=100, streams=False)
    book(ledger, 2, 0.0, tokens=50, streams=False)
    book(ledger, 3, 0.0, tokens=30)

    assert ledger.queue_ms(UNIT, 0.04) == pytest.approx(140.0)
    assert ledger.queue_ms(UNIT, 0.16) == pytest.approx(20.0)
    assert (ledger.num_requests, ledger.num_waiting) == (3, 1)
    assert ledger.end(whole, 9.0)
    assert ledger.num_requests == 2


@settings(max_examples=examples(60))
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["begin", "whole", "first", "end"]),
            st.integers(0, 30),
            st.integers(0, 5000),
            st.floats(-0.5, 2.0),
        ),
        max_size=60,
    )
)
def test_sums_are_right_after_any_order_of_events(steps: list[tuple[str, int, int, float]]) -> None:
    """Whatever happens in whatever order, sums match the leases; nothing is ever negative.

    Requests never get more of the engine's time than has passed. Time may even step back (it must
    not, but the clock is not ours)."""
    ledger, leases, now_s = Ledger(), [], 100.0
    times = [now_s]
    for number, (what, index, tokens, pause_s) in enumerate(steps):
        now_s += pause_s
        times.append(now_s)
        if what in ("begin", "whole"):
            streams = what == "begin"
            leases.append(book(ledger, number, now_s, tokens=tokens, streams=streams))
        elif leases:
            lease = leases[index % len(leases)]
            ledger.first_token(lease, now_s) if what == "first" else ledger.end(lease, now_s)
        assert ledger.queue_ms(UNIT, now_s) >= 0.0
        assert 0 <= ledger.num_waiting <= ledger.num_requests <= len(leases)
        assert ledger.num_queued_tokens >= 0
        assert ledger.queue_at_pace_ms() >= 0.0
    _end_all(ledger, leases, now_s)
    assert sum(map(taken_s, leases)) <= max(times) - min(times) + 1e-6


def taken_s(lease: Lease) -> float:
    """What a lease is charged: its prompt what it was predicted to take, if it had the time."""
    assert lease.spent.prompt_s >= -1e-9
    assert lease.spent.answer_s >= -1e-9
    return min(lease.occupies_s, lease.spent.prompt_s) + lease.spent.answer_s


def _end_all(ledger: Ledger, leases: list[Lease], now_s: float) -> None:
    for lease in leases:
        ledger.end(lease, now_s)
    assert ledger.num_requests == ledger.num_waiting == ledger.num_queued_tokens == 0
    assert ledger.queue_ms(UNIT, now_s) == 0.0


def test_answers_share_each_second_equally() -> None:
    """And together they get what has passed, not a multiple of it."""
    ledger, leases = Ledger(), []
    for number in range(4):
        leases.append(book(ledger, number, number, tokens=0))
        ledger.first_token(leases[-1], number)
    _end_all(ledger, leases, 4.0)

    shares = [lease.spent.answer_s for lease in leases]
    assert shares[0] == pytest.approx(1 + 1 / 2 + 1 / 3 + 1 / 4)
    assert shares[3] == pytest.approx(1 / 4)
    assert sum(shares) == pytest.approx(4.0)


def test_answers_have_the_time_that_prompts_do_not_take() -> None:
    """A prompt of two seconds comes while an answer is decoded for ten, and one that is absurd."""
    ledger = Ledger()
    answer = book(ledger, 1, 0.0, tokens=0)
    ledger.first_token(answer, 0.0)
    prompt = book(ledger, 2, 4.0, tokens=2_000)
    ledger.first_token(prompt, 6.5)
    slow = book(ledger, 3, 8.0, tokens=60_000)
    ledger.first_token(slow, 9.0)
    _end_all(ledger, [answer, prompt, slow], 10.0)

    assert answer.spent.answer_s == pytest.approx(4.0 + 0.5 / 2 + 1.5 / 2 + 1 / 3)
    assert prompt.spent.prompt_s == pytest.approx(2.0)
    assert slow.spent.prompt_s == pytest.approx(1.0)
    assert sum(map(taken_s, [answer, prompt, slow])) == pytest.approx(10.0 - 0.5 / 2)


def test_prompts_alone_have_all_the_time_but_what_others_were_predicted_to_take() -> None:
    """Two come in one step. The first one had not waited for the second."""
    ledger = Ledger()
    one, other = book(ledger, 1, 0.0, tokens=1_000), book(ledger, 2, 2.0, tokens=2_000)
    for lease in (one, other):
        ledger.first_token(lease, 5.0)
    _end_all(ledger, [one, other], 5.0)

    assert (one.spent.prompt_s, other.spent.prompt_s) == (3.0, 3.0)


def test_prompts_that_had_less_time_than_predicted_share_it() -> None:
    ledger = Ledger()
    one, other = book(ledger, 1, 0.0, tokens=9_000), book(ledger, 2, 1.0, tokens=3_000)
    for lease in (one, other):
        ledger.first_token(lease, 4.0)
    _end_all(ledger, [one, other], 9.0)

    assert one.spent.prompt_s == pytest.approx(4.0 * 4.0 / 7.0)
    assert other.spent.prompt_s == pytest.approx(4.0 * 3.0 / 7.0)


@settings(max_examples=examples(60))
@given(
    requests=st.lists(
        st.tuples(
            st.integers(0, 1),  # router
            st.floats(0.0, 5.0),  # begin
            st.sampled_from([0, 100, 2_000, 20_000]),  # predicted ms
            st.floats(0.1, 2.0),  # to the first token
            st.floats(7.0, 9.0),  # to the end
        ),
        min_size=1,
        max_size=12,
    ),
    late_s=st.sampled_from([0.0, 0.01, 0.1]),
)
def test_two_routers_give_each_second_once(
    requests: list[tuple[int, float, int, float, float]], late_s: float
) -> None:
    """But for the delay of their notes, whatever was predicted.

    Each router knows its own requests at once, and those of the other `late_s` later."""
    events = [
        (at_s + (late_s if router != whose else 0.0), kind, number, router)
        for number, (whose, begun_s, _, ttft_s, took_s) in enumerate(requests)
        for router in range(2)
        for kind, at_s in enumerate((begun_s, begun_s + ttft_s, begun_s + ttft_s + took_s))
    ]
    ledgers, leases = (Ledger(), Ledger()), {}
    for now_s, kind, number, router in sorted(events):
        ledger = ledgers[router]
        if kind == 0:
            tokens = requests[number][2]
            leases[number, router] = book(ledger, number, now_s, tokens=tokens)
        elif kind == 1:
            ledger.first_token(leases[number, router], now_s)
        else:
            ledger.end(leases[number, router], now_s)

    given_s = sum(taken_s(leases[number, each[0]]) for number, each in enumerate(requests))
    begun_s = min(each[1] for each in requests)
    over_s = max(each[1] + each[3] + each[4] for each in requests)
    assert given_s <= over_s - begun_s + 2 * len(requests) * late_s + 1e-6


def test_an_answer_that_is_not_streamed_begins_behind_its_prompt() -> None:
    ledger = Ledger()
    whole = book(ledger, 1, 0.0, tokens=2_000, streams=False)
    ledger.queue_ms(UNIT, 5.0)
    ledger.end(whole, 5.0)

    assert whole.spent.prompt_s == pytest.approx(2.0)
    assert whole.spent.answer_s == pytest.approx(3.0)


def test_a_head_without_tokens_adds_no_queue_however_old_it_is() -> None:
    without, hung = Ledger(), Ledger()
    for number in range(3):
        book(without, number, 0.0, tokens=0)
    book(hung, 9, 0.0, tokens=10)

    assert without.queue_ms(UNIT, 100.0) == 0.0
    assert hung.queue_ms(UNIT, 100.0) >= 10_000.0


def test_a_batch_costs_as_much_as_its_prompts_one_by_one() -> None:
    one = Booking(num_uncached_tokens=2_000, num_cached_tokens=0)
    batch = Booking(num_uncached_tokens=64 * 2_000, num_cached_tokens=0, num_prompts=64)

    assert batch.num_mtoken2 == pytest.approx(64 * one.num_mtoken2)
