"""router.check.redis_rules and pool_rules: what is wrong there is told, with what to do."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from router.check.findings import Level
from router.check.pool_rules import of_pool
from router.check.redis_rules import of_redis
from router.check.seen import PatternSeen, PoolSeen, RedisSeen
from router.check.text import size
from router.config import IndexConfig, RedisConfig
from router.messages import FeedId
from tests.check.samples import FEED, POOL, RANK, REDIS, REPLICA, wrong

CONFIG = RedisConfig(url="redis://10.0.0.6:6379/0", lookup_timeout_s=0.005)
LOCAL = IndexConfig()
MIB = 1 << 20

REDIS_CASES: list[tuple[RedisSeen, Level, str, str, str]] = [
    (replace(REDIS, error="gone"), "error", "reachable", "gone", "each router is alone"),
    (replace(REDIS, error="wrong password: see X", is_refused=True), "error", "reachable", "X", ""),
    (replace(REDIS, round_trip_ms=9.0), "note", "distance", "9.0 ms", "a Redis nearby"),
    (replace(REDIS, schema="0"), "error", "namespace", "schema 0", "delete the keys {wr:default}:"),
    (replace(REDIS, schema="9"), "error", "namespace", "schema 9", "update this router"),
    (replace(REDIS, schema="x"), "error", "namespace", "schema x", "not ours"),
    (replace(REDIS, used_bytes=None), "note", "memory", "may not be asked", "+info"),
    (replace(REDIS, policy="allkeys-lru"), "error", "memory", "allkeys-lru", "noeviction"),
    (replace(REDIS, policy="volatile-ttl"), "warning", "memory", "leases", "noeviction"),
    (replace(REDIS, used_bytes=1000 * MIB), "warning", "memory", "1e+03 MiB used", "raise maxmem"),
    (replace(REDIS, max_bytes=0), "note", "memory", "no limit", "maxmemory"),
    (replace(REDIS, save_error=True), "warning", "disk", "last save", "--save ''"),
    (replace(REDIS, refused=("a: bad",)), "warning", "replicas", "a: bad", "{wr:default}:replicas"),
    (
        replace(REDIS, feeds=(replace(FEED, leader=None),)),
        "warning", "feeds", "nobody feeds one#0", "can they reach",
    ),
    (
        replace(REDIS, feeds=(FEED, replace(FEED, id=FeedId("http://h:1#0")))),
        "warning", "names", "not known here: http://h:1", "the same name",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("seen", "level", "about", "text", "hint"), REDIS_CASES)
def test_what_is_wrong_with_redis_is_told(
    seen: RedisSeen, level: Level, about: str, text: str, hint: str
) -> None:
    """One finding says so, and nothing else is called wrong."""
    findings = list(of_redis(seen, config=CONFIG, index=LOCAL, replicas=[REPLICA]))

    (found,) = [f for f in findings if f.level != "ok"]
    assert (found.subject, found.level, found.about) == ("redis", level, about)
    assert text in found.text
    assert hint in found.hint


def test_a_redis_as_it_should_be_has_nothing_wrong() -> None:
    """And says what it is, who shares it and who feeds whom."""
    findings = list(of_redis(REDIS, config=CONFIG, index=LOCAL, replicas=[REPLICA]))

    assert wrong(findings) == []
    texts = " ".join(f.text for f in findings)
    for part in (
        "redis 7.0.15, standalone, 0.3 ms", "schema 1", "10 entries", "2 sessions", "50 MiB used",
        "of 1 GiB", "2: router-a, router-b", "one#0 EXACT by router-a",
    ):  # fmt: skip
        assert part in texts, part


def test_a_new_namespace_is_well() -> None:
    """Nobody was here before."""
    new = replace(REDIS, schema=None, routers=(), feeds=(), num_log_entries=0, round_trip_ms=None)
    findings = list(of_redis(new, config=CONFIG, index=LOCAL, replicas=[REPLICA]))

    assert wrong(findings) == []
    assert {"'default' is new: the first router makes it", "none runs now"} <= {
        f.text for f in findings
    }


def test_feeds_of_routers_that_are_gone_are_no_fault() -> None:
    """Of pools and of states not known, too."""
    feeds = (
        replace(FEED, leader=None, state="degraded", reason="why"),
        replace(FEED, id=FeedId("pool/qwen"), leader=None, state=None, reason=None),
    )
    findings = list(
        of_redis(
            replace(REDIS, routers=(), feeds=feeds, pool_lister="router-a"),
            config=CONFIG,
            index=LOCAL,
            replicas=[REPLICA],
        )
    )

    assert wrong(findings) == []
    assert "one#0 DEGRADED (why) by nobody" in {f.text for f in findings}


def test_feeds_of_replicas_that_left_are_no_fault() -> None:
    """They are forgotten after a day."""
    feeds = (FEED, replace(FEED, id=FeedId("left#0"), leader=None, state=None, reason=None))
    findings = list(
        of_redis(replace(REDIS, feeds=feeds), config=CONFIG, index=LOCAL, replicas=[REPLICA])
    )

    assert wrong(findings) == []
    assert any(f.text.endswith("left#0 by nobody") for f in findings)


def test_a_redis_too_far_for_look_ups_is_told() -> None:
    """In mode redis alone."""
    far = replace(REDIS, round_trip_ms=4.0)
    findings = list(
        of_redis(far, config=CONFIG, index=IndexConfig(mode="redis"), replicas=[REPLICA])
    )

    assert [(f.level, f.about) for f in findings if f.level != "ok"] == [("warning", "distance")]
    assert wrong(list(of_redis(far, config=CONFIG, index=LOCAL, replicas=[REPLICA]))) == []


# -- the pool ------------------------------------------------------------------------------------

POOL_CASES: list[tuple[PoolSeen, Level, str, str, str]] = [
    (replace(POOL, error="gone"), "error", "reachable", "gone", "--metrics_port"),
    (replace(POOL, num_segments=0), "warning", "contents", "no engine gives", "global_segment"),
    (replace(POOL, max_bytes=0), "warning", "contents", "no engine gives", "recompute"),
    (replace(POOL, list_error="cut"), "warning", "keys", "not listed: cut", "--wait"),
    (replace(POOL, models=(PatternSeen(model="m", text=None),)), "note", "keys", "m:", "a prompt"),
    (replace(POOL, publishes_events=True), "note", "events", "not followed", "--mooncake-events"),
    (
        replace(POOL, events_configured=True, events_reach="refused"),
        "error", "events", "(refused)", "--mooncake-events",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("seen", "level", "about", "text", "hint"), POOL_CASES)
def test_what_is_wrong_with_the_pool_is_told(
    seen: PoolSeen, level: Level, about: str, text: str, hint: str
) -> None:
    """Beside the standing note on load failures."""
    findings = [f for f in of_pool(seen, [REPLICA]) if f.about != "load failures"]

    (found,) = [f for f in findings if f.level != "ok"]
    assert (found.subject, found.level, found.about) == ("pool", level, about)
    assert text in found.text
    assert hint in found.hint


def test_a_pool_as_it_should_be_has_one_note() -> None:
    """What engines do when an object vanishes cannot be seen: it is said every time."""
    findings = list(of_pool(POOL, [REPLICA]))

    assert [(f.level, f.about) for f in findings if f.level != "ok"] == [("note", "load failures")]
    assert findings[-1].hint.startswith('"kv_load_failure_policy": "recompute"')
    texts = " ".join(f.text for f in findings)
    for part in ("40 objects", "2 evicted", "2 objects a block", "2 KiB a token", "take part: r1"):
        assert part in texts, part


def test_an_empty_pool_and_followed_events_are_well() -> None:
    """Nothing is there that could be known."""
    empty = replace(
        POOL,
        num_objects=0,
        num_evicted=None,
        used_bytes=0,
        events_configured=True,
        events_reach="open",
        models=(PatternSeen(model="m", text=None), PatternSeen(model="n", text="n@", num_ranks=1)),
    )

    for replicas in ([REPLICA], []):
        findings = list(of_pool(empty, replicas))

        assert [f.about for f in findings if f.level != "ok"] == ["load failures"]


def test_members_are_known_by_their_word_or_taken_for_such() -> None:
    """By their stores, their metrics, the configuration; the rest is only believed."""
    silent = replace(REPLICA, ranks=(replace(RANK, num_pooled=0),))
    replicas = [
        replace(silent, name="told", has_pool_connector=True),
        replace(silent, name="off", reads_pool=False),
        replace(silent, name="maybe"),
        replace(silent, name="gone", error="x"),
        replace(silent, name="odd", ranks=(replace(RANK, algorithm="warmroute"),)),
    ]

    findings = {f.text: f for f in of_pool(POOL, replicas) if f.about in ("members", "hashes")}

    assert "take part: told, odd" in findings
    assert "do not, as configured: off" in findings
    assert any("they take part: maybe;" in text for text in findings)
    assert any("cannot be matched" in text for text in findings)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (1 << 30, "1 GiB"), (5 << 40, "5 TiB")],
)
def test_sizes_are_readable(num_bytes: int, text: str) -> None:
    """In three digits."""
    assert size(num_bytes) == text
