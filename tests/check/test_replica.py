"""router.check.replica, events and tokenizer: what is wrong is found, with what to do."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from router.check.events import Publisher
from router.check.finding import Level
from router.check.replica import ReplicaSeen, judge, judge_together, with_owners
from router.replicas.event_ports import EventPorts
from router.tokens.id_probe import of_chat, of_text
from tests.check.samples import RANK, REPLICA, model, rank, wrong

PLACES = frozenset({"10.0.0.5:8000"})
LOCAL = replace(REPLICA, url="http://127.0.0.1:8000")
CASES: list[tuple[ReplicaSeen, Level, str, str, str]] = [
    (
        replace(REPLICA, error="x refused the connection", failure="no answer"),
        "error", "reachable", "refused", "--port",
    ),
    (
        replace(REPLICA, error="x answered 401", failure="api key"),
        "error", "reachable", "401", "--engine-api-key-file",
    ),
    (
        replace(REPLICA, error="not an OpenAI-compatible server?", failure="other"),
        "error", "reachable", "not", "",
    ),
    (replace(REPLICA, version=None), "note", "engine", "does not report", ""),
    (replace(REPLICA, num_blocks=None), "note", "cache", "guessed", "/metrics"),
    (replace(REPLICA, prefix_caching=False), "warning", "prefix caching", "off", "prefix-caching"),
    (replace(REPLICA, order="drain"), "warning", "orders", "it drains", "replicas undrain r1"),
    (replace(REPLICA, order="remove"), "warning", "orders", "removed it", "replicas add"),
    (
        replace(REPLICA, order="drain", is_added=True),
        "note", "orders", "it drains", "undrain",
    ),
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
    (
        model(is_compared=False), "note", "tokenizer", "not compared", "sends no token ids",
    ),
    (replace(REPLICA, seems="prefill"), "error", "role", "used as both", "role: prefill}"),
    (
        replace(REPLICA, seems="decode", role="prefill"),
        "error", "role", "reports role decode, but is used as prefill", "role: decode}",
    ),
    (
        replace(REPLICA, role="prefill", bootstrap="http://10.0.0.5:8998"),
        "error", "role", "no bootstrap server answers at http://10.0.0.5:8998", "another transfer",
    ),
    # -- its events
    (replace(REPLICA, ranks=(), wants_events=False), "note", "events", "as configured", "--events"),
    (replace(REPLICA, ranks=()), "warning", "events", "without KV events", "--kv-events-config"),
    (
        replace(REPLICA, ranks=(), has_source_route=False),
        "warning", "events", "an older release", "`events` and `replay`",
    ),
    (
        replace(REPLICA, ranks=(), silent_publishers=(Publisher(False, "zmq"),)),
        "warning", "events", '"enable_kv_cache_events": false', '"publisher": "zmq"',
    ),
    (
        replace(REPLICA, ranks=(), silent_publishers=(Publisher(True, "null"),)),
        "warning", "events", '"publisher": "null"', '"publisher": "zmq"',
    ),
    (replace(REPLICA, num_ranks=2), "warning", "events", "1 of 2 ranks", "data-parallel rank"),
    (
        rank(reach="refused"),
        "error", "events", "nothing listens at tcp://10.0.0.5:5557", "another engine",
    ),
    (
        replace(rank(reach="refused"), events_configured=True),
        "error", "events", "nothing listens", "in the configuration",
    ),
    (rank(reach="silent"), "error", "events", "does not answer", "firewall"),
    (rank(reach="unknown host"), "error", "events", "is unknown", "engine"),
    (rank(reach="not an address", reason="x"), "error", "events", "BLIND: x", "engine"),
    (rank(reach="not an address", reported="y"), "error", "events", "'y' is not tcp://", "engine"),
    (rank(has_handshake=False), "error", "events", "not an event publisher", "another port"),
    (
        rank(reach="refused", endpoint="tcp://127.0.0.1:5557"),
        "error", "events", "is on this machine, but the engine runs on 10.0.0.5", "tcp://*:PORT",
    ),
    (
        rank(has_handshake=False, endpoint="tcp://127.0.0.1:5557"),
        "error", "events", "not an event publisher", "another port",
    ),
    *(
        (
            rank(reach=reach, reported=f"tcp://{host}:5557", connects=True, has_handshake=False),
            "error", "events", f"nothing publishes at tcp://{host}:5557", '"tcp://*:5557"',
        )
        for host in ("0.0.0.0", "10.0.0.5", "engine-1")
        for reach in ("refused", "silent", "open")
    ),
    # -- its history
    (rank(replay_endpoint=None), "warning", "replay", "unknown", '"replay_endpoint"'),
    (rank(replay_reach="refused"), "warning", "replay", "(refused)", '"replay_endpoint"'),
    (rank(has_replay=False), "warning", "replay", "no history", "--wait"),
    # -- its state
    (
        rank(state="blind", reason="no events yet", num_batches=0),
        "note", "state", "until its first prompt", "",
    ),
    (
        rank(state="blind", reason="its events are not understood"),
        "warning", "state", "BLIND: its events", "report",
    ),
    (
        rank(state="degraded", reason="hashes cannot be computed and are translated"),
        "warning", "state", "DEGRADED: hashes", "--hash-seeds SEED",
    ),
    (
        rank(state="degraded", reason="hash contract is not verified yet"),
        "note", "state", "not verified", "--hash-seeds",
    ),
    (
        rank(state="degraded", reason="history before the router joined is lost"),
        "warning", "state", "is lost", '"buffer_steps"',
    ),
    (rank(state="degraded", reason="something else"), "warning", "state", "something else", ""),
    (rank(is_verified=False), "note", "hashes", "guessed: sha256", ""),
    (replace(REPLICA, sleep="asleep"), "warning", "sleep", "no requests", "/wake_up"),
    (
        replace(REPLICA, sleep="emptied", has_pool_connector=True),
        "warning", "sleep", "emptied the shared pool", "/wake_up",
    ),
    (replace(REPLICA, sleep="paused"), "warning", "pause", "no requests", "/resume"),
    (rank(algorithm="warmroute"), "note", "hashes", "translated", ""),
    (
        replace(REPLICA, role="decode", transfer="store", transfers=("nixl", "mooncake")),
        "error", "role", "use nixl and mooncake", "transfer: nixl",
    ),
    (
        replace(REPLICA, several=("NixlConnector", "MooncakeStoreConnector"), transfers=("store",)),
        "note", "connectors", "NixlConnector, MooncakeStoreConnector; it loads", "poll_s",
    ),
    (replace(REPLICA, is_late=True), "note", "configuration", "is slow", "--wait"),
    (replace(REPLICA, speculates=True), "note", "drafts", "is learned", "eagle: false"),
    (
        replace(REPLICA, speculates=True, drops_last=True, eagle=False),
        "note", "drafts", "drops the last block", "eagle: true",
    ),
    (replace(REPLICA, eagle=True), "warning", "drafts", "engine does not use it", ""),
    (
        replace(rank(lookahead=1), speculates=True, eagle=True),
        "note", "drafts", "it drops no block: eagle has no effect", "remove eagle",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("seen", "level", "about", "text", "hint"), CASES)
def test_what_is_wrong_is_reported_with_a_hint(
    seen: ReplicaSeen, level: Level, about: str, text: str, hint: str
) -> None:
    """In one finding, and nothing else is wrong."""
    findings = list(judge(seen))

    (found,) = [f for f in findings if f.level != "ok"]
    assert (found.subject, found.level, found.about) == ("replica r1", level, about)
    assert text in found.text
    assert hint in found.hint


def test_a_replica_as_it_should_be_has_nothing_wrong() -> None:
    """It is described."""
    findings = list(judge(REPLICA))

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
    findings = list(judge(replace(REPLICA, role="decode", seems="both")))

    assert wrong(findings) == []
    assert [f.text for f in findings if f.about == "role"] == ["decode"]


def test_silence_without_history_may_be_another_port() -> None:
    """Where a replay is empty, there is nothing."""
    seen = rank(
        state="blind", reason="no events yet", num_batches=0, has_replay=None, replay_endpoint=None
    )

    (found,) = [f for f in judge(seen) if f.about == "state"]

    assert (found.level, "another port" in found.hint) == ("note", True)


def test_small_facts_are_reported() -> None:
    """Adapters, a seed, ranks, who added it; what was not compared is not called proven."""
    seen = replace(
        model(num_adapters=2, is_compared=False),
        ranks=(replace(RANK, seed="7", num_batches=1), replace(RANK, rank=1, endpoint="tcp://h:2")),
        num_ranks=2,
        is_added=True,
        prefix_caching=None,
    )

    findings = list(judge(seen))

    texts = " ".join(f.text for f in findings)
    for part in (
        "2 adapters",
        "seed '7'",
        "2 data-parallel ranks",
        "added at an",
        "not compared",
        "1 batch of",
    ):
        assert part in texts
    assert {"events #0", "replay #1", "state #1", "hashes #1"} <= {f.about for f in findings}
    assert "prefix caching" not in {f.about for f in findings}


# -- several -------------------------------------------------------------------------------------

OTHER = replace(
    REPLICA,
    name="r2",
    identity="two",
    started_s=2.0,
    ranks=(replace(RANK, endpoint="tcp://10.0.0.6:5557"),),
)


def test_replicas_that_have_nothing_to_do_with_each_other_are_well() -> None:
    """Two, and one that is not there."""
    gone = replace(REPLICA, name="r3", error="x", ranks=(), models=())

    assert list(judge_together([REPLICA, OTHER, gone, replace(gone, name="r4")])) == []


def test_one_engine_under_two_addresses_is_found() -> None:
    """It started when the other did, and publishes where the other does."""
    twin = replace(REPLICA, name="r2", url="http://localhost:8000")
    alias = replace(twin, ranks=(replace(RANK, endpoint="tcp://alias:5557"),), places=PLACES)

    for first, second in ((REPLICA, twin), (replace(REPLICA, places=PLACES), alias)):
        (found,) = judge_together([first, second])
        assert found.level == "error"
        assert "r1 and r2 are the same engine" in found.text


def test_two_engines_behind_one_proxy_are_two() -> None:
    """They are at one place, and started at different times."""
    one, other = replace(REPLICA, places=PLACES), replace(OTHER, places=PLACES)

    assert list(judge_together([one, other])) == []


def test_two_engines_with_one_event_endpoint_are_found() -> None:
    """One would be credited with the other's cache; whose it is, the engines say, or nobody."""
    used, other = {"events[0]": "h:5557"}, {"events[0]": "h:5560"}
    slip = replace(OTHER, event_ports=EventPorts("r2", used, other))
    owner = replace(REPLICA, event_ports=EventPorts("r1", used, used))
    unsaid = replace(REPLICA, event_ports=EventPorts("r1", used))

    for first, wrong_ones in ((owner, ["r2"]), (unsaid, ["r1", "r2"])):
        seen = with_owners([first, slip])
        found = [f for each in seen for f in judge(each) if f.level == "error"]
        assert [f.subject for f in found] == [f"replica {name}" for name in wrong_ones]
        assert all("is an event endpoint of" in f.text for f in found)
        assert all(f.text.startswith("BLIND: ") for f in found)
        assert list(judge_together(seen)) == []


def test_another_port_than_the_engine_reports_is_not_well_until_it_is_proven() -> None:
    ports = EventPorts("r1", {"events[0]": "h:5557"}, {"events[0]": "h:5560"})
    (seen,) = with_owners([replace(REPLICA, event_ports=ports)])

    (found,) = judge_together([seen])

    assert (found.level, found.subject, found.about) == ("warning", "replica r1", "event ports")
    assert found.text == "events[0] is h:5557, and its engine reports port 5560"
    assert list(judge_together([seen], proven={"r1"})) == []


def test_different_hashes_of_one_model_are_noted() -> None:
    """They cost time, and the pool cannot be shared."""
    other = replace(OTHER, ranks=(replace(OTHER.ranks[0], seed="7"),))

    (found,) = judge_together([REPLICA, other])

    assert found.level == "note"
    assert "seed '7'" in found.text
    assert "PYTHONHASHSEED" in found.hint
