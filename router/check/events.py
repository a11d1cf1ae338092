"""A replica's event streams: whether each can be followed, and what its history shows."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

from msgspec.structs import replace

from policies.view import CandidateId
from router.base.addresses import reachable_endpoint
from router.base.contracts import DEFAULT_SEED, BlockKey, HashContract
from router.base.errors import ConfigError
from router.base.messages import KvGroup
from router.check.finding import Finding, Subject
from router.check.seen import CONNECT_S, Deadline, RankSeen, ReplicaSeen, reach
from router.cluster.candidate_source import CandidateSource
from router.config import Config
from router.discovery.engine_facts import EngineFacts
from router.index.block_index import BlockIndex
from router.index.candidate_stream import StreamReason
from router.index.hit_length import is_understood
from router.kv_events.follower import Pace, follow
from router.kv_events.stream import RankStream
from router.kv_events.subscriber import REPLAY_TIMEOUT_S, EngineEvents, EventSource, Received
from router.replicas.replica import Entry

EVENTS_PORT: Final = 5557


def events_flag(port: int = EVENTS_PORT) -> str:
    """Write the flag of an engine that publishes events at a port, and history at the next."""
    return (
        '--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", '
        f'"endpoint": "tcp://*:{port}", "replay_endpoint": "tcp://*:{port + 1}"}}\''
    )


_HANDSHAKE_S: Final = 2.0  # for a publisher whose port is open
_LIVE_S: Final = 0.3  # for a live batch, if there is no replay to wait for
_PACE: Final = Pace(tick_s=0.05, quiet_s=3600.0, subscribe_s=3600.0)
_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})


# -- look ----------------------------------------------------------------------------------------


async def look(
    rank: int,
    source: EventSource,
    *,
    entry: Entry,
    facts: EngineFacts,
    config: Config,
    is_pooled: bool,
    deadline: Deadline,
) -> RankSeen:
    """Try a rank's endpoints, then follow its events until its history is known.

    Args:
        is_pooled: Whether its replica is in a pool: then it reports what it stores there.
    """
    url = entry.replica.url.rstrip("/")
    seen = RankSeen(rank=rank, source=source, endpoint=source.endpoint, reach="not an address")
    try:
        endpoint = reachable_endpoint(source.endpoint, url)
        replay = reachable_endpoint(source.replay_endpoint, url) if source.replay_endpoint else None
    except ValueError as exc:
        return replace(seen, why_no_address=str(exc))
    timeout_s = deadline.at_most(CONNECT_S)
    seen = replace(
        seen,
        endpoint=endpoint,
        reach=await reach(endpoint, timeout_s=timeout_s),
        replay_endpoint=replay,
        replay_reach=await reach(replay, timeout_s=timeout_s) if replay else None,
    )
    if seen.reach != "open":
        return seen
    try:
        events = _Events(
            endpoint,
            replay if seen.replay_reach == "open" else None,
            topic=source.topic,
            replay_timeout_s=deadline.at_most(REPLAY_TIMEOUT_S),
        )
    except ConfigError as exc:
        return replace(seen, reach="not an address", why_no_address=exc.message)
    return await _follow(seen, events, entry, facts, config, is_pooled, deadline)


class _Events(EngineEvents):
    """Events that remember whether their publisher ever answered."""

    is_up = False

    async def receive(self, timeout_s: float) -> Received:
        received = await super().receive(timeout_s)
        self.is_up = self.is_up or bool(received.is_up)
        return received


async def _follow(
    seen: RankSeen,
    events: _Events,
    entry: Entry,
    facts: EngineFacts,
    config: Config,
    is_pooled: bool,
    deadline: Deadline,
) -> RankSeen:
    index, candidate = BlockIndex(), CandidateId(entry.name)
    pooled: list[BlockKey] = []
    stream = CandidateSource(
        candidate,
        index,
        publisher=None,  # `events` is open
        block_size=facts.block_size,
        capacity_blocks=facts.num_gpu_blocks,
        seeds=config.hash.seeds,
        lora_paths={m.id: m.root for m in facts.models if m.parent and m.root},
        pool_stored=pooled.extend if is_pooled else None,
    ).rank_stream()
    await _read_history(stream, events, deadline)
    counters = stream.counters
    is_replayed = counters.history.num_replays > counters.history.num_failed_replays
    return replace(
        seen,
        is_publisher=events.is_up,
        has_replay=is_replayed if events.has_replay and events.is_up else None,
        status=stream.status(),
        num_batches=counters.num_batches,
        num_blocks=index.num_blocks(candidate),
        num_unknown_tier=counters.blocks.num_unknown_medium,
        num_pooled=len(pooled),
    )


async def _read_history(stream: RankStream, events: _Events, deadline: Deadline) -> None:
    """Follow until history is read, or there is none to read, or the time is over."""
    async with asyncio.TaskGroup() as tg:
        following = tg.create_task(follow(stream, events, pace=_PACE))
        await _until(lambda: events.is_up, deadline.at_most(_HANDSHAKE_S))
        if events.is_up and events.has_replay:
            await _until(lambda: _is_read(stream), deadline.left_s)
        elif events.is_up:
            await asyncio.sleep(deadline.at_most(_LIVE_S))
        following.cancel()


async def _until(is_so: Callable[[], bool], timeout_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not is_so():  # noqa: ASYNC110 (nothing signals the change)
                await asyncio.sleep(0.02)


def _is_read(stream: RankStream) -> bool:
    counters = stream.counters
    is_answered = counters.history.num_replays > 0 and stream.wanted_replay is None
    return is_answered or counters.history.num_failed_replays > 0


# -- judge ---------------------------------------------------------------------------------------


def judge(subject: Subject, seen: ReplicaSeen, *, is_wanted: bool) -> Iterator[Finding]:
    """Judge a replica's event streams.

    Args:
        is_wanted: Whether the configuration wants them followed.
    """
    silent = [each for each in seen.publishers or () if not _publishes(each)]
    if not is_wanted:
        yield subject.note(
            "events", "BLIND: not followed, as configured", "--set events.enabled=true"
        )
    elif seen.ranks:
        for rank in seen.ranks:
            yield from _rank(subject, seen, rank)
        if len(seen.ranks) < seen.num_ranks:
            yield subject.warning(
                "events",
                f"{len(seen.ranks)} of {seen.num_ranks} ranks publish: the others are BLIND",
                "name one endpoint per data-parallel rank in `events` of the replica",
            )
    elif silent:
        enabled = str(silent[0].enable_kv_cache_events).lower()
        how = f'"enable_kv_cache_events": {enabled}, "publisher": "{silent[0].publisher}"'
        yield subject.warning("events", f"BLIND: it publishes no events ({how})", events_flag())
    elif seen.publishers is not None:
        yield subject.warning("events", "BLIND: started without KV events", events_flag())
    else:
        yield subject.warning(
            "events",
            "BLIND: it does not report its event endpoints (an older release)",
            f"{events_flag()}, and name the endpoints in `events` and `replay` of the replica",
        )


def _publishes(source: EventSource) -> bool:
    return source.enable_kv_cache_events and source.publisher in ("zmq", None)


def _rank(subject: Subject, seen: ReplicaSeen, rank: RankSeen) -> Iterator[Finding]:
    suffix = f" #{rank.rank}" if seen.num_ranks > 1 else ""
    unreachable = _unreachable(seen, rank)
    if unreachable is not None:
        text, hint = unreachable
        yield subject.error(f"events{suffix}", f"BLIND: {text}", hint)
        return
    yield subject.ok(f"events{suffix}", f"published at {rank.endpoint}")
    yield _replay(subject, f"replay{suffix}", rank)
    yield _state(subject, f"state{suffix}", rank)
    if rank.num_unknown_tier:
        yield subject.note(
            f"tiers{suffix}",
            f"{rank.num_unknown_tier:,} blocks are on a tier that is not followed (vLLM's disk or "
            "object tier): hits there are not predicted",
            "only the GPU's cache, the CPU tier and Mooncake pools are followed",
        )
    if rank.status is not None:
        is_verified = rank.status.is_verified
        yield _contract(subject, f"hashes{suffix}", rank.status.contract, is_verified=is_verified)
        if rank.status.groups:
            yield _groups(subject, f"kv groups{suffix}", rank.status.groups)


def _unreachable(seen: ReplicaSeen, rank: RankSeen) -> tuple[str, str] | None:
    """Return what is wrong with an endpoint, and what to do; None: a publisher answers there."""
    hint = f"does another engine on that machine use the port? {events_flag()}, with its own ports"
    if seen.entry.replica.events:
        hint = "check `events` of the replica in the configuration, and the engine's own"
    connects, endpoint = rank.source.connects, rank.endpoint
    host, own = urlsplit(endpoint).hostname, urlsplit(seen.url).hostname
    if rank.foreign is not None:
        return rank.foreign, (
            "engines on one machine need different ports in --kv-events-config; see `events` and "
            "`replay` of the replica in the configuration"
        )
    if rank.reach == "not an address":
        text = f"{rank.source.endpoint!r} is not tcp://HOST:PORT or ipc://PATH"
        return rank.why_no_address or text, hint
    if rank.reach == "open" and rank.is_publisher:
        return None
    if rank.reach == "open" and not connects:
        return f"{endpoint} is not an event publisher", f"is it another port? {hint}"
    if host in _LOOPBACK and own not in _LOOPBACK:
        return (
            f"{endpoint} is on this machine, but the engine runs on {own}",
            '"endpoint": "tcp://*:PORT" in --kv-events-config (with a host vLLM connects instead '
            "of binding), or name the endpoint in `events` of the replica",
        )
    if connects:
        return (
            f"nothing publishes at {rank.source.endpoint}: vLLM connects to an endpoint with a "
            "host (also 0.0.0.0) instead of binding it",
            f'"endpoint": "tcp://*:{urlsplit(endpoint).port}" in --kv-events-config, or name the '
            "endpoint in `events` of the replica",
        )
    if rank.reach == "unknown host":
        return f"the host of {endpoint} is unknown", hint
    if rank.reach == "silent":
        hint = "is there a firewall, or an unpublished container port?"
        return f"{endpoint} does not answer", hint
    return f"nothing listens at {endpoint}", hint


def _replay(subject: Subject, about: str, rank: RankSeen) -> Finding:
    flag = '"replay_endpoint": "tcp://*:PORT" in --kv-events-config'
    if rank.replay_endpoint is None:
        text = "none: its cache contents from before the router's start are unknown"
        return subject.warning(about, text, flag)
    if rank.replay_reach != "open":
        text = f"{rank.replay_endpoint} does not answer ({rank.replay_reach})"
        return subject.warning(about, text, f"open the port: {flag}")
    if not rank.has_replay:
        text = f"{rank.replay_endpoint} returns no history"
        return subject.warning(about, text, f"is it another port? {flag}; or a longer --wait")
    batches = "1 batch" if rank.num_batches == 1 else f"{rank.num_batches:,} batches"
    return subject.ok(about, f"{batches} of history from {rank.replay_endpoint}")


_NETWORK: Final = "check the engine and the network"
_UNKNOWN: Final = "is it vLLM, and a known release? Please report it"
_HINTS: Final[Mapping[str, str]] = {
    StreamReason.UNVERIFIED: "it ends with the first event of a plain prompt; if not, name the "
    "engines' PYTHONHASHSEED: --set hash.seeds=SEED",
    StreamReason.TRANSLATED: "PYTHONHASHSEED=SEED for the engines and --set hash.seeds=SEED here, "
    "or --prefix-caching-hash-algo sha256",
    StreamReason.PARTIAL: '"replay_endpoint", and a larger "buffer_steps", in '
    "--kv-events-config; it ends when the engine clears its cache or restarts",
    StreamReason.GROUPS: "its hits are predicted too low; please report model and release",
    StreamReason.EVENTS_NOT_UNDERSTOOD: _UNKNOWN,
    StreamReason.BATCH_NOT_UNDERSTOOD: _UNKNOWN,
    StreamReason.UNREACHABLE: _NETWORK,
    StreamReason.LOST: _NETWORK,
}


def _state(subject: Subject, about: str, rank: RankSeen) -> Finding:
    if rank.state == "exact":
        return subject.ok(about, f"EXACT: {rank.num_blocks:,} blocks known")
    if rank.num_batches == 0 and rank.reason == StreamReason.NO_EVENTS:
        hint = "" if rank.has_replay else "if it had prompts since then: is it another port?"
        return subject.note(about, "no events yet: BLIND until its first prompt", hint)
    text, hint = f"{rank.state.upper()}: {rank.reason}", _HINTS.get(rank.reason, "")
    create = subject.note if rank.reason == StreamReason.UNVERIFIED else subject.warning
    return create(about, text, hint)


def _contract(
    subject: Subject, about: str, contract: HashContract, *, is_verified: bool
) -> Finding:
    seed = "" if contract.seed == DEFAULT_SEED else f", seed {contract.seed!r}"
    ahead = f" and {contract.lookahead} after it" if contract.lookahead else ""
    name = f"{contract.algorithm}{seed}, {contract.block_size} tokens a block{ahead}"
    if contract.algorithm == "warmroute":
        return subject.note(about, "translated: the engine's hashes cannot be computed")
    if not is_verified:
        return subject.note(about, f"guessed: {name}; its events will confirm it")
    return subject.ok(about, f"detected in its events: {name}")


def _groups(subject: Subject, about: str, groups: Sequence[KvGroup]) -> Finding:
    """List the KV groups, and those of an unknown kind."""
    texts = Counter(_group_text(group) for group in groups)
    text = "; ".join(f"{n} x {text}" if n > 1 else text for text, n in sorted(texts.items()))
    strange = sorted({group.kind for group in groups if not is_understood(group)})
    if strange:
        names = ", ".join(repr(kind) for kind in strange)
        hint = f"not understood: {names}; only blocks that all groups hold from the start count"
        return subject.warning(about, text, hint)
    return subject.ok(about, text)


def _group_text(group: KvGroup) -> str:
    window = "" if group.window is None else f" of {group.window} tokens"
    return f"{group.kind or 'unknown kind'}{window}, blocks of {group.block_size}"
