"""policies.decode: who decodes, and whether that one computes the prompt, too."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from policies import create
from policies.decode import local_ms, transfer_ms
from tests.policies.snapshots import PLAIN, replica, snapshot

READS = replace(PLAIN, ms_per_fetch=5.0)


@pytest.mark.parametrize(
    ("gpu", "pool", "here", "there"),
    [
        (0, None, 100.0, 15.0),  # 1,000 tokens: computed, or read
        (992, None, 0.8, 5.08),  # a turn that adds next to nothing
        (0, 990, 15.9, 15.0),  # the pool has most: 5 + 9.9 to read, 1.0 to compute
        (500, 400, 50.0, 10.0),  # it holds more than the pool
        (500, 900, 19.0, 10.0),
    ],
)
def test_what_a_prompt_costs_where_it_is_decoded(
    gpu: int, pool: int | None, here: float, there: float
) -> None:
    """Computed there, or read there."""
    asked = snapshot(replica("d", gpu=gpu, cost=READS), pool=pool)

    assert local_ms(asked, asked.replicas[0]) == pytest.approx(here)
    assert transfer_ms(asked, asked.replicas[0]) == pytest.approx(there)


def test_one_that_does_not_read_the_pool_computes() -> None:
    """What others would read is no help to it."""
    asked = snapshot(replace(replica("d", cost=READS), reads_pool=False), pool=990)

    assert local_ms(asked, asked.replicas[0]) == pytest.approx(100.0)


def test_answers_that_run_there_wait_while_it_computes() -> None:
    """A turn that adds 20 tokens: 2 ms for it alone, 5.2 to have it read."""
    views = [
        replace(replica("d", gpu=980, requests=requests, cost=READS), num_waiting=waiting)
        for requests, waiting in ((0, 0), (1, 0), (2, 0), (4, 3), (4, 2))
    ]
    asked = snapshot(*views)

    assert [local_ms(asked, view) for view in views] == pytest.approx([2.0, 4.0, 6.0, 4.0, 6.0])
    computes = [cost.num_uncached_tokens for cost in create("decode_load").decide(asked).costs]
    assert computes == [20, 20, 0, 20, 0]


@pytest.mark.parametrize(
    ("requests", "chosen"),
    [(0, "holder"), (3, "holder"), (8, "idle")],
)
def test_a_session_stays_until_its_replica_is_too_busy(requests: int, chosen: str) -> None:
    """10,000 tokens are 105 ms to read: five requests at 20 ms."""
    asked = snapshot(
        replica("holder", gpu=10_000, requests=requests, cost=READS),
        replica("idle", cost=READS),
        tokens=10_001,
    )

    decision = create("decode_load").decide(asked)

    assert decision.candidate == chosen
    costs = {cost.id: cost for cost in decision.costs}
    assert costs["idle"].num_fetched_tokens == 10_001
    assert costs["holder"].num_uncached_tokens == 1
    assert costs["holder"].others_ms == pytest.approx(20.1 * requests)  # one token is computed


def test_equals_are_drawn() -> None:
    """So that an idle fleet spreads."""
    chosen = {
        create("decode_load").decide(snapshot(replica("a"), replica("b"), number=number)).candidate
        for number in range(20)
    }

    assert chosen == {"a", "b"}


def test_an_answer_s_time_decides_where_it_is_known() -> None:
    """Fewer requests, but longer ones: each of its tokens comes later."""
    short = replace(replica("short", requests=4, cost=READS), tbt_ms=10.0)
    long = replace(replica("long", requests=2, cost=READS), tbt_ms=14.0)

    decision = create("decode_load").decide(snapshot(long, short))
    guessed = create("decode_load").decide(snapshot(long, replace(short, tbt_ms=None)))

    assert (decision.candidate, guessed.candidate) == ("short", "long")
    assert {cost.id: cost.others_ms for cost in decision.costs} == {"short": 2000, "long": 2800}
    assert "10.0 ms a token" in decision.reason


@pytest.mark.parametrize(
    ("free", "chosen"),
    [
        ((1_199, None), "other"),  # a prompt of 1,000 tokens, an answer of 200
        ((1_200, None), "holder"),
        ((None, 0), "holder"),
        ((100, 1_199), "holder"),  # no room anywhere: as if there were
    ],
)
def test_one_that_would_run_out_of_kv_is_left_out(
    free: tuple[int | None, int | None], chosen: str
) -> None:
    """Unless all would."""
    holder = replace(replica("holder", gpu=900, cost=READS), num_free_tokens=free[0])
    other = replace(replica("other", cost=READS), num_free_tokens=free[1])

    decision = create("decode_load").decide(snapshot(holder, other))

    assert decision.candidate == chosen
    assert ("no replica has free KV" in decision.reason) == (free == (100, 1_199))
