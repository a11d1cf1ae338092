"""router.tenants.accounts: limits held, by one router and by several."""

from __future__ import annotations

import random

import msgspec
import pytest

from router.base.errors import RateLimited
from router.base.limits import Limits
from router.base.messages import Consumed, TenantUsage
from router.tenants.accounts import ALIVE_S, Accounts
from router.tenants.file import TenantEntry

TENANT = TenantEntry(name="a", requests_per_minute=60, uncached_tokens_per_minute=60_000)


def accounts_of(entry: TenantEntry = TENANT) -> Accounts:
    accounts = Accounts()
    accounts.follow({entry.name: entry}, 0.0)
    return accounts


def ask(limits: Limits, num_tokens: int, now_s: float) -> bool:
    """Let one request through, or not."""
    try:
        limits.enter(now_s)
    except RateLimited:
        return False
    limits.leave()
    try:
        limits.charge(num_tokens, now_s)
    except RateLimited:
        return False
    return True


# -- one router ----------------------------------------------------------------------------------


def test_requests_a_minute_are_held() -> None:
    """61 at once: the last learns when to come again, and what its limits are."""
    limits = accounts_of()["a"]
    for _ in range(60):
        limits.enter(0.0)

    with pytest.raises(RateLimited) as refused:
        limits.enter(0.0)
    assert refused.value.retry_after_s == pytest.approx(1.0)
    assert refused.value.headers["x-ratelimit-limit-requests"] == "60"
    assert refused.value.headers["x-ratelimit-remaining-requests"] == "0"
    assert refused.value.headers["x-ratelimit-reset-requests"] == "60.000s"
    assert limits.num_in_flight == 60


def test_cached_tokens_cost_nothing_and_predictions_are_corrected() -> None:
    """What the engine found in its cache is given back; what it did not is taken."""
    limits = accounts_of()["a"]
    assert limits.tokens is not None

    charge = limits.charge(50_000, 0.0)
    charge.settle(10_000, 0.0)
    assert limits.tokens.level(0.0) == 50_000
    charge.settle(60_000, 0.0)
    assert limits.tokens.level(0.0) == 0
    with pytest.raises(RateLimited, match="uncached tokens"):
        limits.charge(1, 0.0)
    limits.charge(0, 0.0)  # all of it is cached


def test_requests_in_flight_are_held() -> None:
    """One more may come when one has ended."""
    limits = accounts_of(TenantEntry(name="a", max_in_flight=1))["a"]
    limits.enter(0.0)

    with pytest.raises(RateLimited, match="at a time"):
        limits.enter(0.0)
    limits.leave()
    limits.enter(0.0)


def test_a_tenant_without_limits_is_not_limited() -> None:
    """No client learns of any, nor do other routers."""
    accounts = accounts_of(TenantEntry(name="a"))
    for _ in range(10_000):
        assert ask(accounts["a"], 10**9, 0.0)

    assert accounts["a"].headers(0.0) == {}
    assert accounts.note(0.0) is None


# -- several routers -----------------------------------------------------------------------------


@pytest.mark.parametrize("num_routers", [2, 5])
def test_all_routers_together_hold_the_limit(num_routers: int) -> None:
    """Ten minutes of five times the load: the mean is the limit's, at any router.

    Notes come every 0.1 s; one in three is lost, one in three comes twice, and late.
    """
    rng = random.Random(num_routers)
    routers = [accounts_of() for _ in range(num_routers)]
    num_requests = num_tokens = 0
    late: list[tuple[int, Consumed, float]] = []
    for step in range(6000):
        now_s = step * 0.1
        if rng.random() < 0.5:
            router = rng.randrange(num_routers)
            if ask(routers[router]["a"], 1500, now_s):
                num_requests += 1
                num_tokens += 1500
        for sender, note, sent_s in late:
            for receiver, accounts in enumerate(routers):
                if receiver != sender and sent_s >= 0:
                    accounts.receive(f"r{sender}", note, now_s)
        late = []
        for sender, accounts in enumerate(routers):
            note = accounts.note(now_s)
            if note is not None and rng.random() < 0.67:
                late += [(sender, note, now_s)] * rng.choice([1, 1, 2])

    limit = 60_000 * (10 + 1)  # ten minutes, and the bucket that was full at first
    assert limit * 0.97 <= num_tokens <= limit + 60_000 * num_routers * 0.05
    assert num_requests <= 60 * 11


def test_a_burst_at_two_routers_is_paid_back() -> None:
    """Both let a minute's worth through before they receive each other's notes; then both wait."""
    one, two = accounts_of(), accounts_of()
    for accounts, name, other in ((one, "one", two), (two, "two", one)):
        note = accounts.note(0.0)
        assert note is not None
        other.receive(name, note, 0.0)
    for accounts in (one, two):
        assert ask(accounts["a"], 60_000, 0.1)
    for accounts, name, other in ((one, "one", two), (two, "two", one)):
        note = accounts.note(0.2)
        assert note is not None
        other.receive(name, note, 0.2)

    assert not ask(one["a"], 1, 59.0)
    assert not ask(two["a"], 1, 59.0)
    assert ask(one["a"], 1, 61.0)


def test_a_router_that_comes_later_has_no_fresh_limit() -> None:
    """It learns what is left; what was used before it came is not taken twice."""
    old, new = accounts_of(), accounts_of()
    assert ask(old["a"], 50_000, 0.0)
    note = old.note(0.0)
    assert note is not None
    new.receive("old", note, 0.0)
    assert new["a"].tokens is not None

    assert new["a"].tokens.level(0.0) == 10_000
    new.receive("old", note, 0.0)
    assert new["a"].tokens.level(0.0) == 10_000


def test_what_happened_while_redis_was_gone_is_no_debt() -> None:
    """Each held the whole limit; afterwards the lower level counts."""
    one, two = accounts_of(), accounts_of()
    note = two.note(0.0)
    assert note is not None
    one.receive("two", note, 0.0)
    one.lost()
    for minute in range(30):
        assert ask(two["a"], 60_000, minute * 61.0)
    note = two.note(30 * 61.0)
    assert note is not None
    one.receive("two", note, 30 * 61.0)
    assert one["a"].tokens is not None

    assert one["a"].tokens.level(30 * 61.0) >= 0


def test_a_silent_router_starts_anew() -> None:
    """After 3 s: what it let through meanwhile is not known."""
    accounts = accounts_of()
    accounts.receive("r", Consumed((TenantUsage("a", 0, 0, 60, 60_000),)), 0.0)
    accounts.receive("r", Consumed((TenantUsage("a", 50, 0, 60, 60_000),)), ALIVE_S + 0.1)
    assert accounts["a"].requests is not None

    assert accounts["a"].requests.level(ALIVE_S + 0.1) == 60


def test_only_what_changed_is_sent_and_all_now_and_then() -> None:
    """Every second all, so that a new router receives it; else silence costs nothing."""
    accounts = Accounts()
    entries = {n: TenantEntry(name=n, requests_per_minute=5) for n in ("a", "b")}
    accounts.follow(entries, 0.0)
    first = accounts.note(10.0)
    assert first is not None
    accounts["a"].enter(10.1)
    second = accounts.note(10.1)
    assert second is not None

    assert [usage.tenant for usage in first.usages] == ["a", "b"]
    assert [usage.tenant for usage in second.usages] == ["a"]
    assert accounts.note(10.2) is None
    third = accounts.note(11.1)
    assert third is not None
    assert len(third.usages) == 2


def test_absurd_notes_do_bounded_harm() -> None:
    """At most a minute's worth of debt; unknown tenants and routers without end are nothing."""
    accounts = accounts_of()
    for taken in (0, 2**62, -(2**62), 2**62):
        for router in range(1000):
            usage = TenantUsage("a", taken, taken, -(2**62), None)
            accounts.receive(f"r{router}", Consumed((usage, TenantUsage("?", 1, 1, 1, 1))), 0.0)
    assert accounts["a"].requests is not None

    assert -60 <= accounts["a"].requests.level(0.0) <= 60
    assert accounts.num_routers <= 256


def test_notes_survive_the_wire() -> None:
    """As msgpack, in a few bytes."""
    note = accounts_of().note(5.0)
    assert note is not None
    packed = msgspec.msgpack.encode(note)

    assert msgspec.msgpack.decode(packed, type=Consumed) == note
    assert len(packed) < 40


def test_accounts_outlive_versions_of_the_file() -> None:
    """What is used stays used; a tenant that is gone is forgotten."""
    accounts = accounts_of()
    assert ask(accounts["a"], 60_000, 0.0)
    accounts.follow({"a": TENANT, "b": TenantEntry(name="b")}, 0.0)
    assert not ask(accounts["a"], 1, 0.0)
    accounts.follow({"b": TenantEntry(name="b")}, 0.0)

    with pytest.raises(KeyError):
        accounts["a"]
