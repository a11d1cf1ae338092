"""router.check.replica, events, tokenizer and together: each fault is found, with what to do."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from router import config
from router.base.messages import KvGroup
from router.check import together
from router.check.finding import Finding, Level
from router.check.replica import judge
from router.check.seen import ReplicaSeen
from router.config import EventsConfig
from router.index.candidate_stream import StreamReason
from router.kv_events.subscriber import EventSource
from router.replicas.replica import ServedModel
from router.tokens.trust import of_chat, of_text
from tests.check.samples import (
    RANK,
    REPLICA,
    SERVED,
    configured,
    facts,
    gone,
    info,
    model,
    named,
    rank,
    status,
    wrong,
)

NO_RANKS = replace(REPLICA, ranks=())
CONNECTS = EventSource(endpoint="tcp://0.0.0.0:5557")
CONFIG = config.load()
CASES: list[tuple[ReplicaSeen, Level, str, str, str]] = [
    (gone("x refused the connection", "no answer"), "error", "reachable", "refused", "--port"),
    (gone("x answered 401", "api key"), "error", "reachable", "401", "--set engine.api_key_file"),
    (gone("not an OpenAI server?"), "error", "reachable", "not", ""),
    (facts(version=None), "note", "engine", "does not report", ""),
    (facts(num_gpu_blocks=None), "note", "cache", "guessed", "/metrics"),
    (facts(prefix_caching=False), "warning", "prefix caching", "off", "prefix-caching"),
    (replace(REPLICA, takes_tools=False), "warning", "tools", "agents get 400", "--tool-call"),
    (replace(REPLICA, info=None), "note", "configuration", "is slow", "--wait"),
    # -- its tokenizer
    (model(is_loaded=False), "warning", "tokenizer", "not loaded in time", "--tokens-models qwen="),
    (
        model(engine_only="no files"),
        "warning", "tokenizer", "cannot be loaded: no files", "--tokens-models qwen=",
    ),
    (
        model(difference=of_text("digits", "2024", ["202", "4"], ["2", "024"])),
        "error", "tokenizer", "'2024' (digits) as 202|4, this router as 2|024", "transformers",
    ),
    (
        model(difference=of_chat([1, 2, 3], [1, 2])),
        "error", "tokenizer", "differ from token 2 on", "--default-chat-template-kwargs",
    ),
    (model(is_compared=False), "note", "tokenizer", "not compared", "sends no token ids"),
    (
        model(joins_system=True),
        "note", "system messages", "in front only", "totalTokensReminder",
    ),
    # -- its role and drafts
    (info(role="prefill"), "error", "role", "used as both", "role: prefill}"),
    (
        info(configured(role="prefill"), role="decode"),
        "error", "role", "reports role decode, but is used as prefill", "role: decode}",
    ),
    (
        replace(configured(role="prefill"), bootstrap="http://10.0.0.5:8998"),
        "error", "role", "no bootstrap server answers at http://10.0.0.5:8998", "another transfer",
    ),
    (
        info(configured(role="decode", transfer="store"), transfers=("nixl", "mooncake")),
        "error", "role", "use nixl and mooncake", "transfer: nixl",
    ),
    (facts(speculates=True), "note", "drafts", "taken to drop no block", "eagle: false"),
    (
        info(facts(configured(eagle=False), speculates=True), eagle=True),
        "note", "drafts", "drops the last block", "eagle: true",
    ),
    (configured(eagle=True), "warning", "drafts", "engine does not use it", ""),
    (
        replace(REPLICA, ranks=(replace(RANK, num_unknown_tier=1_200),)),
        "note", "tiers", "1,200 blocks are on a tier that is not followed", "Mooncake pools",
    ),
    (
        replace(configured(eagle=True), ranks=(replace(RANK, status=status(lookahead=1)),)),
        "note", "drafts", "it drops no block: eagle has no effect", "remove eagle",
    ),
    (facts(sleep="asleep"), "warning", "sleep", "no requests", "/wake_up"),
    (
        facts(sleep="emptied", has_pool_connector=True, loads_kv=True),
        "warning", "sleep", "emptied the shared pool", "/wake_up",
    ),
    (facts(sleep="paused"), "warning", "pause", "no requests", "/resume"),
    # -- its events
    (NO_RANKS, "warning", "events", "without KV events", "--kv-events-config"),
    (
        replace(NO_RANKS, publishers=None),
        "warning", "events", "an older release", "`events` and `replay`",
    ),
    *(
        (
            replace(NO_RANKS, publishers=(EventSource("tcp://*:1", **source),)),
            "warning", "events", text, '"publisher": "zmq"',
        )
        for source, text in (
            ({"enable_kv_cache_events": False}, '"enable_kv_cache_events": false'),
            ({"publisher": "null"}, '"publisher": "null"'),
        )
    ),
    (facts(num_ranks=2), "warning", "events", "1 of 2 ranks", "data-parallel rank"),
    (
        rank(reach="refused"),
        "error", "events", "nothing listens at tcp://10.0.0.5:5557", "another engine",
    ),
    (
        named("r1", rank(reach="refused"), events=("tcp://10.0.0.5:5557",)),
        "error", "events", "nothing listens", "in the configuration",
    ),
    (rank(reach="silent"), "error", "events", "does not answer", "firewall"),
    (rank(reach="unknown host"), "error", "events", "is unknown", "engine"),
    (
        rank(reach="not an address", why_no_address="x"),
        "error", "events", "BLIND: x", "engine",
    ),
    (
        rank(reach="not an address", source=EventSource("y")),
        "error", "events", "'y' is not tcp://", "engine",
    ),
    (rank(is_publisher=False), "error", "events", "not an event publisher", "another port"),
    (
        rank(reach="refused", endpoint="tcp://127.0.0.1:5557"),
        "error", "events", "is on this machine, but the engine runs on 10.0.0.5", "tcp://*:PORT",
    ),
    *(
        (
            rank(reach=reach, source=CONNECTS, is_publisher=False),
            "error", "events", "nothing publishes at tcp://0.0.0.0:5557", '"tcp://*:5557"',
        )
        for reach in ("refused", "silent", "open")
    ),
    # -- its history and state
    (rank(replay_endpoint=None), "warning", "replay", "unknown", '"replay_endpoint"'),
    (rank(replay_reach="refused"), "warning", "replay", "(refused)", '"replay_endpoint"'),
    (rank(has_replay=False), "warning", "replay", "no history", "--wait"),
    *(
        (rank(status=status(state, reason), num_batches=0), level, "state", text, hint)
        for state, reason, level, text, hint in (
            ("blind", StreamReason.NO_EVENTS, "note", "until its first prompt", ""),
            ("blind", StreamReason.EVENTS_NOT_UNDERSTOOD, "warning", "BLIND: its events", "report"),
            ("degraded", StreamReason.TRANSLATED, "warning", "DEGRADED: hashes", "hash.seeds=S"),
            ("degraded", StreamReason.UNVERIFIED, "note", "not verified", "hash.seeds"),
            ("degraded", StreamReason.PARTIAL, "warning", "is lost", '"buffer_steps"'),
            ("degraded", StreamReason.GROUPS, "warning", "KV group", "predicted too low"),
            ("degraded", "something else", "warning", "something else", ""),
        )
    ),
    (rank(status=status(is_verified=False)), "note", "hashes", "guessed: sha256", ""),
    (rank(status=status(algorithm="warmroute")), "note", "hashes", "translated", ""),
    (
        rank(status=status(groups=(KvGroup(0, "full_attention", 16), KvGroup(1, "ring", 16)))),
        "warning", "kv groups", "ring, blocks of 16", "not understood: 'ring'",
    ),
]  # fmt: skip


def judged(seen: ReplicaSeen) -> list[Finding]:
    return list(judge(seen, CONFIG))


@pytest.mark.parametrize(("seen", "level", "about", "text", "hint"), CASES)
def test_each_fault_is_one_finding_with_a_hint(
    seen: ReplicaSeen, level: Level, about: str, text: str, hint: str
) -> None:
    (found,) = [f for f in judged(seen) if f.level != "ok"]

    assert (found.subject, found.level, found.about) == ("replica r1", level, about)
    assert text in found.text
    assert hint in found.hint


def test_a_replica_in_good_order_is_described() -> None:
    findings = judged(REPLICA)

    assert wrong(findings) == []
    assert {f.about for f in findings} == {
        "reachable", "engine", "model", "tokenizer", "cache", "prefix caching", "events", "replay",
        "state", "hashes",
    }  # fmt: skip
    texts = " ".join(f.text for f in findings)
    assert "131,072 tokens" in texts
    assert "EXACT: 1,200 blocks" in texts
    assert "detected in its events: sha256, 16 tokens" in texts


def test_a_role_that_fits_is_described() -> None:
    """An engine of both kinds may be used as either."""
    findings = judged(info(configured(role="decode"), role="both"))

    assert wrong(findings) == []
    assert [f.text for f in findings if f.about == "role"] == ["decode"]


def test_events_that_are_not_wanted_are_noted() -> None:
    tree = config.load(flags={("events", "enabled"): False})

    assert wrong(list(judge(NO_RANKS, tree))) == [
        ("note", "events", "BLIND: not followed, as configured")
    ]


def test_a_replica_that_names_none_of_several_pools_reads_none() -> None:
    pools = [{"name": name, "master": f"http://{name}:1"} for name in "ab"]
    tree = config.load(flags={("mooncake", "pools"): pools})

    assert [about for _, about, _ in wrong(list(judge(replace(REPLICA, pool=None), tree)))] == [
        "pool"
    ]


def test_silence_without_history_may_be_another_port() -> None:
    seen = rank(
        status=status("blind", StreamReason.NO_EVENTS),
        num_batches=0,
        has_replay=None,
        replay_endpoint=None,
    )
    (found,) = [f for f in judged(seen) if f.about == "state"]

    assert (found.level, "another port" in found.hint) == ("note", True)


def test_details_are_reported() -> None:
    """Adapters, a seed, and several ranks."""
    adapters = [ServedModel(id=name, parent="qwen") for name in ("a", "b")]
    seen = replace(
        facts(num_ranks=2, prefix_caching=None, models=(SERVED, *adapters)),
        ranks=(
            replace(RANK, status=status(seed="7"), num_batches=1),
            replace(RANK, rank=1, endpoint="tcp://h:2"),
        ),
    )
    findings = judged(seen)

    texts = " ".join(f.text for f in findings)
    for part in ("2 adapters", "seed '7'", "2 data-parallel ranks", "1 batch of"):
        assert part in texts
    assert {"events #0", "replay #1", "state #1", "hashes #1"} <= {f.about for f in findings}
    assert "prefix caching" not in {f.about for f in findings}


# -- several -------------------------------------------------------------------------------------

OTHER = replace(
    facts(named("r2", url="http://10.0.0.6:8000"), started_s=2.0),
    ranks=(replace(RANK, endpoint="tcp://10.0.0.6:5557"),),
)


def compared(*replicas: ReplicaSeen) -> list[Finding]:
    return list(together.judge(replicas, EventsConfig()))


def test_replicas_that_do_not_share_anything_are_well() -> None:
    absent = gone("x")

    assert compared(REPLICA, OTHER, named("r3", absent), named("r4", absent)) == []


def publishing(seen: ReplicaSeen, used: str, reported: str | None) -> ReplicaSeen:
    """Configure an event endpoint, and have the engine report one."""
    sources = {} if reported is None else {0: EventSource(reported)}
    return named(seen.name, facts(seen, event_sources=sources), events=(used,))


def test_an_event_endpoint_of_another_replica_is_found() -> None:
    """One would be credited with the other's cache. Without the engines' word both are suspect."""
    slip = publishing(OTHER, "tcp://h:5557", "tcp://h:5560")
    owner = publishing(REPLICA, "tcp://h:5557", "tcp://h:5557")
    unknown = publishing(REPLICA, "tcp://h:5557", None)

    for first, names in ((owner, ["r2"]), (unknown, ["r1", "r2"])):
        seen = together.with_owners([first, slip], EventsConfig())
        found = [f for each in seen for f in judged(each) if f.level == "error"]
        assert [f.subject for f in found] == [f"replica {name}" for name in names]
        assert all("is an event endpoint of" in f.text for f in found)
        assert compared(*seen) == []


def test_another_port_than_the_engine_reports_is_noted() -> None:
    """It may be a mapped port of a container."""
    seen = publishing(REPLICA, "tcp://h:5557", "tcp://h:5560")

    (found,) = compared(seen)

    assert (found.level, found.subject, found.about) == ("note", "replica r1", "event ports")
    assert found.text == "events[0] is h:5557, and its engine reports port 5560"


def test_different_hashes_of_one_model_are_noted() -> None:
    """They cost time, and the pool cannot be shared."""
    other = replace(OTHER, ranks=(replace(OTHER.ranks[0], status=status(seed="7")),))

    (found,) = compared(REPLICA, other)

    assert found.level == "note"
    assert "seed '7'" in found.text
    assert "PYTHONHASHSEED" in found.hint
