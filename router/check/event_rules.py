"""What follows from what was seen of a replica's events. Pure: hints name the engine's flags."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from router.check.findings import Finding, Level
from router.check.seen import RankSeen, ReplicaSeen
from router.contracts import DEFAULT_SEED

EVENTS_FLAG: Final = (
    '--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", '
    '"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}\''
)
_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})


def of_events(subject: str, seen: ReplicaSeen) -> Iterator[Finding]:
    """Judge a replica's event streams."""
    if not seen.wants_events:
        yield Finding(
            subject, "events", "note", "BLIND: not followed, as configured", "--events-enabled"
        )
    elif seen.ranks:
        for rank in seen.ranks:
            yield from _rank(subject, seen, rank)
        if len(seen.ranks) < seen.num_ranks:
            yield Finding(
                subject,
                "events",
                "warning",
                f"{len(seen.ranks)} of {seen.num_ranks} ranks publish: the others are BLIND",
                "name one endpoint per data-parallel rank in `events` of the replica",
            )
    elif seen.silent_publishers:
        how = ", ".join(
            f'"enable_kv_cache_events": {str(one.enabled).lower()}, "publisher": "{one.publisher}"'
            for one in seen.silent_publishers[:1]
        )
        yield Finding(
            subject, "events", "warning", f"BLIND: publishes nothing ({how})", EVENTS_FLAG
        )
    elif seen.has_source_route:
        yield Finding(subject, "events", "warning", "BLIND: started without KV events", EVENTS_FLAG)
    else:
        yield Finding(
            subject,
            "events",
            "warning",
            "BLIND: it does not say where its events are (an older release)",
            f"{EVENTS_FLAG}, and name the endpoints in `events` and `replay` of the replica",
        )


def _rank(subject: str, seen: ReplicaSeen, rank: RankSeen) -> Iterator[Finding]:
    about = f"events #{rank.rank}" if seen.num_ranks > 1 else "events"
    wrong = _unreachable(seen, rank)
    if wrong is not None:
        text, hint = wrong
        yield Finding(subject, about, "error", f"BLIND: {text}", hint)
        return
    yield Finding(subject, about, "ok", f"published at {rank.endpoint}")
    yield _replay(subject, about.replace("events", "replay"), rank)
    yield _state(subject, about.replace("events", "state"), rank)
    yield _contract(subject, about.replace("events", "hashes"), rank)


def _unreachable(seen: ReplicaSeen, rank: RankSeen) -> tuple[str, str] | None:
    """Say what is wrong with an endpoint, and what to do; None: a publisher answers there."""
    if rank.reach == "not an address":
        return (
            rank.reason or f"{rank.told!r} is not tcp://HOST:PORT or ipc://PATH",
            _endpoint_hint(seen),
        )
    if rank.reach == "open" and rank.has_handshake:
        return None
    if rank.reach == "open":
        return (
            f"what listens at {rank.endpoint} is no event publisher",
            f"another port? {_endpoint_hint(seen)}",
        )
    host, own = urlsplit(rank.endpoint).hostname, urlsplit(seen.url).hostname
    if host in _LOOPBACK and own not in _LOOPBACK:
        return (
            f"{rank.endpoint} is this machine, and the engine runs on {own}",
            '"endpoint": "tcp://*:PORT" in --kv-events-config (with a host vLLM connects instead '
            "of binding), or name the endpoint in `events` of the replica",
        )
    if rank.reach == "unknown host":
        return f"nobody knows the host of {rank.endpoint}", _endpoint_hint(seen)
    if rank.reach == "silent":
        return (
            f"{rank.endpoint} does not answer",
            "a firewall, or a container port that is not published?",
        )
    return f"nobody listens at {rank.endpoint}", _endpoint_hint(seen)


def _endpoint_hint(seen: ReplicaSeen) -> str:
    if seen.events_configured:
        return "see `events` of the replica in the configuration, and the engine's own"
    return (
        f"does another engine on that machine have the port? {EVENTS_FLAG}, with ports of its own"
    )


def _replay(subject: str, about: str, rank: RankSeen) -> Finding:
    flag = '"replay_endpoint": "tcp://*:PORT" in --kv-events-config'
    if rank.replay_endpoint is None:
        return Finding(
            subject,
            about,
            "warning",
            "none: what it cached before a router starts is unknown",
            flag,
        )
    if rank.replay_reach != "open":
        text = f"{rank.replay_endpoint} does not answer ({rank.replay_reach})"
        return Finding(subject, about, "warning", text, f"open the port: {flag}")
    if not rank.has_replay:
        text = f"{rank.replay_endpoint} gives no history"
        return Finding(subject, about, "warning", text, f"another port? {flag}; or --wait longer")
    batches = "1 batch" if rank.num_batches == 1 else f"{rank.num_batches:,} batches"
    text = f"{batches} of history from {rank.replay_endpoint}"
    return Finding(subject, about, "ok", text)


def _state(subject: str, about: str, rank: RankSeen) -> Finding:
    if rank.state == "exact":
        return Finding(subject, about, "ok", f"EXACT: {rank.num_blocks:,} blocks known")
    if rank.num_batches == 0 and rank.reason == "no events yet":
        return Finding(
            subject,
            about,
            "note",
            "no events yet: BLIND until its first prompt",
            "" if rank.has_replay else "if there were prompts since it started: another port?",
        )
    text = f"{rank.state.upper()}: {rank.reason}"
    hint = next((hint for reason, hint in _REASONS.items() if reason in rank.reason), "")
    level: Level = "note" if rank.reason in _PASSING else "warning"
    return Finding(subject, about, level, text, hint)


_PASSING: Final = frozenset({"hash contract not verified yet"})

_REASONS: Final = {
    "hash contract not verified yet": "it ends with the first event that starts a plain prompt; if "
    "not, name the engines' PYTHONHASHSEED: --hash-seeds SEED",
    "hashes cannot be computed": "PYTHONHASHSEED=SEED for the engines and --hash-seeds SEED here, "
    "or --prefix-caching-hash-algo sha256",
    "history before we joined is lost": '"replay_endpoint", and a larger "buffer_steps", in '
    "--kv-events-config; it ends when the engine clears its cache or restarts",
    "not understood": "is it vLLM, and a release that is known here? Please report it",
    "publisher unreachable": "look at the engine and the network",
    "event stream lost": "look at the engine and the network",
}


def _contract(subject: str, about: str, rank: RankSeen) -> Finding:
    seed = "" if rank.seed == DEFAULT_SEED else f", seed {rank.seed!r}"
    name = f"{rank.algorithm}{seed}, {rank.block_size} tokens a block"
    if rank.algorithm == "warmroute":
        return Finding(subject, about, "note", "translated: the engine's own cannot be computed")
    if not rank.is_verified:
        return Finding(subject, about, "note", f"guessed: {name}; its events will show")
    return Finding(subject, about, "ok", f"found in its events: {name}")
