"""A replica: whether it answers, what it serves, and what only several can have wrong."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, Literal

from msgspec.structs import replace

from router.check import events, tokenizer
from router.check.deadline import Deadline
from router.check.events import EventsSeen, Publisher
from router.check.finding import Finding, Subject
from router.check.reach import resolved
from router.check.tokenizer import ModelSeen, Tokenizers
from router.config import Config, bootstrap_of, pool_of
from router.discovery.engine_api import EngineApi, EngineFacts
from router.discovery.engine_pages import ServerInfo, SleepState
from router.errors import (
    HostUnknown,
    KeyRefused,
    TlsRefused,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from router.kv_events.subscriber import EventSource
from router.pool.catalog import PoolCatalog
from router.pool.keys import names_in_keys
from router.replicas.event_ports import EventOwners, EventPorts
from router.replicas.registry import Entry
from router.roles import Role, Transfer

Failure = Literal["api key", "unknown host", "no answer", "other"]
_REPLICAS: Final = Subject("replicas")
_TOOLS_S: Final = 5.0  # to render one short chat
_SAID: Final = 0.6  # of the time that is left: until an engine's page about itself has to come


class ReplicaSeen(EventsSeen, frozen=True, kw_only=True):
    """One replica. `error` says why nothing else is known; None: not reported."""

    name: str
    identity: str  # its name among routers
    is_added: bool = False  # by an operator, at some router's admin API
    order: Literal["none", "drain", "remove"] = "none"  # of an operator
    error: str | None = None
    failure: Failure | None = None  # None: it answered
    version: str | None = None
    block_size: int | None = None
    num_blocks: int | None = None  # per rank
    num_cache_tokens: int | None = None  # the same, by the engine's own word
    prefix_caching: bool | None = None
    started_s: float | None = None
    models: tuple[ModelSeen, ...] = ()
    takes_tools: bool | None = None  # whether a chat may offer tools; None: not known
    pool: str | None = None  # the Mooncake pool that it is in, "" the only one; None: none
    reads_pool: bool | None = None  # as configured
    unnamed: tuple[str, ...] = ()  # the pools that there are, where it says none of several
    sleep: SleepState = "awake"
    has_pool_connector: bool = False  # it reports one; False: or it does not say
    role: Role = "both"  # as configured
    seems: Role | None = None  # what it shows; None: nothing
    transfer: Transfer = "store"  # as configured, of a role that is not both
    transfers: tuple[Transfer, ...] = ()  # that it can do, by its own word; empty: or it says none
    several: tuple[str, ...] = ()  # in its MultiConnector, in order; empty: none, or not said
    speculates: bool = False  # it has metrics of speculative decoding
    eagle: bool | None = None  # as configured; None: to be learned
    drops_last: bool | None = None  # the last block of a hit, by its own word; None: it says none
    weights: Mapping[str, str] = {}  # which they are, by its own word; empty: it says none
    key_head: str | None = None  # [PREFIX@]MODEL of its keys in a pool, by its own word
    places: frozenset[str] = frozenset()  # ADDRESS:PORT behind its URL
    event_ports: EventPorts | None = None  # None: it has not answered
    is_late: bool = False  # it has a page about its configuration, which did not come in time
    bootstrap: str | None = None  # where its bootstrap server should be; None: it needs none
    has_bootstrap: bool = False  # it answers there


# -- look ----------------------------------------------------------------------------------------


async def look(
    entry: Entry,
    *,
    config: Config,
    api: EngineApi,
    tokenizers: Tokenizers,
    pools: Mapping[str, PoolCatalog],
    deadline: Deadline,
) -> ReplicaSeen:
    """See what a router would when it finds a replica; what does not answer is in the result."""
    url, name = entry.replica.url.rstrip("/"), pool_of(entry.replica, tuple(pools))
    seen = ReplicaSeen(
        name=entry.name,
        identity=entry.identity,
        url=url,
        wants_events=config.events.enabled,
        events_configured=bool(entry.replica.events),
        pool=name,
        reads_pool=entry.replica.pool if isinstance(entry.replica.pool, bool) else None,
        unnamed=() if name is not None or entry.replica.pool is False else tuple(pools),
        role=entry.replica.role,
        transfer=entry.replica.transfer or config.prefill.transfer,
        eagle=entry.replica.eagle,
        is_added=not any(r.identity == entry.identity for r in config.replicas),
        order="remove" if entry.leaving else "drain" if entry.draining else "none",
    )
    if entry.leaving:
        return seen
    with deadline.waiting(entry.name):
        try:
            async with asyncio.timeout(deadline.left_s):
                facts = await api.facts(entry.name, url)
                publishers = await api.event_publishers(entry.name, url)
                bootstrap, has_bootstrap = await _bootstrap(entry, config, api)
                places = await resolved(url)
        except UpstreamError as exc:
            return replace(seen, error=exc.message, failure=_failure(exc))
        except TimeoutError:
            return replace(seen, error=f"{url} did not answer", failure="no answer")
    seen = replace(
        _with_facts(seen, facts, publishers),
        bootstrap=bootstrap,
        has_bootstrap=has_bootstrap,
        places=places,
        event_ports=facts.event_ports(entry.name, config.events, entry.replica),
    )
    pool_stored = None
    pool = pools.get(seen.pool) if seen.pool is not None else None
    if pool is not None:
        base = _base(facts)
        pool.add_replica(
            entry.name,
            base,
            names_in_keys(facts.models),
            layout=entry.replica.pool_layout,
            kv_dtype=facts.kv_dtype,
        )
        pool_stored = partial(pool.stored, base, replica=entry.name)
    async with asyncio.TaskGroup() as tg:
        # Not all the time that is left: the pool is looked at when all replicas have been.
        asking = tg.create_task(
            api.server_info(entry.name, url, timeout_s=deadline.at_most(_SAID * deadline.left_s))
        )
        offering = tg.create_task(
            api.takes_tools(entry.name, url, _base(facts), timeout_s=deadline.at_most(_TOOLS_S))
        )
        models = [
            tg.create_task(
                tokenizers.look(
                    entry.name,
                    url,
                    model,
                    version=facts.version,
                    num_adapters=sum(other.parent == model.id for other in facts.models),
                    api=api,
                )
            )
            for model in facts.models
            if model.parent is None
        ]
        ranks = [
            tg.create_task(
                events.look(
                    rank,
                    source,
                    entry=entry,
                    facts=facts,
                    config=config,
                    pool_stored=pool_stored,
                    deadline=deadline,
                )
            )
            for rank, source in facts.endpoints(config.events, entry.replica).items()
        ]
    info = asking.result() or ServerInfo()
    return replace(
        seen,
        is_late=asking.result() is None,
        seems=info.role or facts.seems,
        transfers=info.transfers,
        several=info.several,
        drops_last=info.eagle,
        weights=info.weights,
        key_head=info.key_head,
        models=tuple(task.result() for task in models),
        takes_tools=offering.result(),
        ranks=tuple(task.result() for task in ranks),
    )


def _base(facts: EngineFacts) -> str:
    """Return the model that is no adapter, the first of several."""
    bases = [model.id for model in facts.models if model.parent is None]
    return bases[0] if bases else facts.models[0].id


async def _bootstrap(entry: Entry, config: Config, api: EngineApi) -> tuple[str | None, bool]:
    """Ask a prefill replica's bootstrap server for its ranks, where it has to have one."""
    replica = entry.replica
    transfer = replica.transfer or config.prefill.transfer
    if (replica.role, transfer) != ("prefill", "mooncake"):
        return None, False
    url = bootstrap_of(replica)
    try:
        return url, bool(await api.engine_ids(entry.name, url))
    except UpstreamError:
        return url, False


def _failure(error: UpstreamError) -> Failure:
    match error:
        case KeyRefused():
            return "api key"
        case TlsRefused():
            return "other"
        case HostUnknown():
            return "unknown host"
        case UpstreamUnreachable() | UpstreamTimeout():
            return "no answer"
    return "other"


def _with_facts(
    seen: ReplicaSeen, facts: EngineFacts, publishers: list[EventSource] | None
) -> ReplicaSeen:
    return replace(
        seen,
        version=facts.version,
        block_size=facts.block_size,
        num_blocks=facts.num_gpu_blocks,
        num_cache_tokens=facts.num_cache_tokens,
        prefix_caching=facts.prefix_caching,
        started_s=facts.started_s,
        num_ranks=facts.num_ranks,
        has_source_route=publishers is not None,
        silent_publishers=tuple(
            Publisher(one.enable_kv_cache_events, one.publisher)
            for one in publishers or ()
            if not one.enable_kv_cache_events or one.publisher not in ("zmq", None)
        ),
        has_pool_connector=facts.has_pool_connector,
        sleep=facts.sleep,
        speculates=facts.speculates,
    )


# -- judge ---------------------------------------------------------------------------------------

_HINTS: Final[dict[Failure, str]] = {
    "api key": "--engine-api-key-file FILE",
    "unknown host": "is the name correct, and known to DNS or /etc/hosts of this machine?",
    "no answer": "is it running, are --host and --port correct, is there a firewall?",
    "other": "",
}


NO_TOOLS: Final = (
    'agents get 400: "auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser '
    "to be set"
)
TOOLS_HINT: Final = (
    "--enable-auto-tool-choice --tool-call-parser PARSER for the engine; docs/guides/agents.md "
    "lists the parser of each model family"
)


def judge(seen: ReplicaSeen) -> Iterator[Finding]:
    """Judge one replica."""
    subject = Subject(f"replica {seen.name}")
    if seen.order != "none":
        yield _order(subject, seen)
    if seen.order == "remove":
        return
    if seen.error is not None:
        yield subject.error("reachable", seen.error, _HINTS[seen.failure or "other"])
        return
    added = " (added at an admin API)" if seen.is_added else ""
    yield subject.ok("reachable", seen.url + added)
    if seen.sleep != "awake":
        yield _sleep(subject, seen)
    yield _engine(subject, seen)
    if seen.is_late:
        yield subject.note(
            "configuration",
            "its /server_info is slow: connectors, role, drafts and weights are unknown",
            "check again: only the first answer is slow; or use a longer --wait",
        )
    for model in seen.models:
        yield from tokenizer.judge(subject, model)
    if seen.takes_tools is False:
        yield subject.warning("tools", NO_TOOLS, TOOLS_HINT)
    yield _capacity(subject, seen)
    if seen.prefix_caching is False:
        yield subject.warning(
            "prefix caching",
            "off: every prompt is recomputed from its first token",
            "start the engine without --no-enable-prefix-caching",
        )
    elif seen.prefix_caching:
        yield subject.ok("prefix caching", "on")
    if seen.unnamed:
        yield subject.warning(
            "pool",
            f"it names no pool, and there are several ({', '.join(seen.unnamed)}): it counts as "
            "reading none",
            "replicas[].pool: NAME, or false",
        )
    yield from _role(subject, seen)
    if seen.several:
        yield _connectors(subject, seen)
    yield from _speculation(subject, seen)
    yield from events.judge(subject, seen)


def _role(subject: Subject, seen: ReplicaSeen) -> Iterator[Finding]:
    """Judge its role: what is configured against what it shows."""
    if seen.seems not in (None, "both", seen.role):
        yield subject.error(
            "role",
            f"it reports role {seen.seems}, but is used as {seen.role}",
            f"replicas: - {{url: {seen.url}, role: {seen.seems}}}; {_partner(seen.seems)}",
        )
    elif seen.role != "both" and seen.transfers and seen.transfer not in seen.transfers:
        yield subject.error(
            "role",
            f"{seen.role} with transfer {seen.transfer}, but its connectors use "
            + " and ".join(seen.transfers),
            f"transfer: {seen.transfers[0]}, here and at its partners",
        )
    elif seen.bootstrap is not None and not seen.has_bootstrap:
        yield subject.error(
            "role",
            f"prefill, but no bootstrap server answers at {seen.bootstrap}",
            "bootstrap: http://HOST:PORT of its VLLM_MOONCAKE_BOOTSTRAP_PORT, or another transfer",
        )
    elif seen.role != "both":
        yield subject.ok("role", seen.role)


def _connectors(subject: Subject, seen: ReplicaSeen) -> Finding:
    """Judge what a MultiConnector holds. It saves to all, and loads from one."""
    several = ", ".join(seen.several)
    text = f"MultiConnector: {several}; it loads from the first connector that has tokens"
    if seen.pool is not None and "store" in seen.transfers:
        return subject.note(
            "connectors",
            f"{text}, and does not report what it stores in the pool: that is known after a "
            "listing",
            "lower mooncake.poll_s and mooncake.list_s, or use MooncakeStoreConnector alone",
        )
    return subject.ok("connectors", text)


def _speculation(subject: Subject, seen: ReplicaSeen) -> Iterator[Finding]:
    """Judge whether it is known what becomes of the last block of a hit."""
    has_metrics = seen.block_size is not None
    shown = seen.drops_last if seen.drops_last is not None or seen.speculates else False
    if any(rank.lookahead for rank in seen.ranks):
        text = "its hashes cover the tokens after a block, so it drops no block"
        if seen.eagle:
            yield subject.note("drafts", f"{text}: eagle has no effect", "remove eagle: true")
        else:
            yield subject.ok("drafts", text)
    elif shown is None and seen.eagle is None:
        yield subject.note(
            "drafts",
            "it speculates; whether it drops the last block of each hit is learned from answers",
            f"replicas: - {{url: {seen.url}, eagle: true}} if its method is eagle, eagle3 or "
            "mtp (until vLLM 0.32 also dflash, dspark), else eagle: false",
        )
    elif shown is False and seen.eagle and (has_metrics or seen.drops_last is False):
        yield subject.warning(
            "drafts",
            "eagle is set, but the engine does not use it: predictions are one block too low",
            "",
        )
    elif shown and seen.eagle is not True:
        yield subject.note(
            "drafts",
            "it drops the last block of each hit",
            f"replicas: - {{url: {seen.url}, eagle: true}}",
        )
    elif seen.eagle is not None:
        yield subject.ok("drafts", "drops the last block" if seen.eagle else "drops no block")


def _partner(role: Role | None) -> str:
    if role == "prefill":
        return "and role: decode for the replicas that answer its prompts"
    return "and role: prefill for the replicas that compute its prompts"


def _order(subject: Subject, seen: ReplicaSeen) -> Finding:
    if seen.order == "remove":
        text, hint = "an operator removed it", f"warmroute replicas add {seen.url}"
    else:
        text = "it drains: an operator stopped new requests"
        hint = f"warmroute replicas undrain {seen.name}"
    create = subject.note if seen.is_added else subject.warning
    return create("orders", text, hint)


def _sleep(subject: Subject, seen: ReplicaSeen) -> Finding:
    if seen.sleep == "paused":
        return subject.warning(
            "pause", "its engine is paused and gets no requests", f"POST {seen.url}/resume"
        )
    lost = "; it lost its cache" if seen.sleep == "emptied" else ""
    if seen.sleep == "emptied" and seen.has_pool_connector:
        lost += "; it emptied the shared pool"
    return subject.warning(
        "sleep", f"its engine sleeps and gets no requests{lost}", f"POST {seen.url}/wake_up"
    )


def _engine(subject: Subject, seen: ReplicaSeen) -> Finding:
    ranks = f", {seen.num_ranks} data-parallel ranks" if seen.num_ranks > 1 else ""
    if seen.version:
        return subject.ok("engine", f"version {seen.version}{ranks}")
    return subject.note("engine", f"does not report its version{ranks}")


def _capacity(subject: Subject, seen: ReplicaSeen) -> Finding:
    if seen.block_size is None or seen.num_blocks is None:
        text = "it does not report its cache size: guessed"
        return subject.note(
            "cache", text, "is its /metrics reachable? (--disable-log-stats hides it)"
        )
    num_tokens = seen.num_cache_tokens or seen.block_size * seen.num_blocks
    each = " per rank" if seen.num_ranks > 1 else ""
    text = f"{seen.num_blocks:,} blocks of {seen.block_size} tokens{each}: {num_tokens:,} tokens"
    return subject.ok("cache", text)


# -- judge several -------------------------------------------------------------------------------


def with_owners(replicas: Sequence[ReplicaSeen]) -> tuple[ReplicaSeen, ...]:
    """Note of each rank whether its endpoints are another replica's."""
    twins = {twin.name for _, twin in _twins(replicas)}  # what they have is the same anyway
    owners = EventOwners(
        each.event_ports
        for each in replicas
        if each.event_ports is not None and each.name not in twins
    )
    return tuple(
        replace(
            each,
            ranks=tuple(
                replace(rank, foreign=owners.why_foreign(each.name, rank.rank))
                for rank in each.ranks
            ),
        )
        for each in replicas
    )


def judge_together(
    replicas: Sequence[ReplicaSeen], proven: Collection[str] = ()
) -> Iterator[Finding]:
    """Judge what only several replicas can have wrong, or a running router shows.

    Args:
        proven: Replicas of which a running router predicts what their engines report.
    """
    for first, twin in _twins(replicas):
        yield _REPLICAS.error(
            "addresses",
            f"{first.name} and {twin.name} are the same engine",
            "name it once, or its load counts in halves",
        )
    for seen in replicas:
        why = seen.event_ports.why_doubtful() if seen.event_ports is not None else None
        is_foreign = any(rank.foreign for rank in seen.ranks)
        if why is not None and not is_foreign and seen.name not in proven:
            yield Subject(f"replica {seen.name}").warning(
                "event ports",
                why,
                "is it another engine's port? Predictions prove a mapped port (a container): check "
                "again next to a router that has served requests",
            )
    yield from _contracts(replicas)


def _twins(replicas: Sequence[ReplicaSeen]) -> Iterator[tuple[ReplicaSeen, ReplicaSeen]]:
    """Find one engine behind two addresses: it started in the same moment, and is at one place.

    A place alone may be a proxy's, and several engines start in one moment.
    """
    seen: dict[tuple[object, ...], ReplicaSeen] = {}
    for replica in replicas:
        if replica.error is not None or replica.started_s is None:
            continue
        places = {*replica.places, *(rank.endpoint for rank in replica.ranks[:1])}
        marks = [(replica.started_s, replica.version, place) for place in sorted(places)]
        first = next((seen[mark] for mark in marks if mark in seen), None)
        for mark in marks:
            seen.setdefault(mark, replica)
        if first is not None:
            yield first, replica


def _contracts(replicas: Sequence[ReplicaSeen]) -> Iterator[Finding]:
    by_model: defaultdict[str, set[tuple[str, str, int]]] = defaultdict(set)
    for replica in replicas:
        contracts = {
            (rank.algorithm, rank.seed, rank.block_size)
            for rank in replica.ranks
            if rank.is_verified and rank.has_handshake
        }
        for model in replica.models:
            by_model[model.id] |= contracts
    for name, contracts in by_model.items():
        if len(contracts) > 1:
            ways = "; ".join(f"{a}, seed {s!r}, {b} tokens" for a, s, b in sorted(contracts))
            yield _REPLICAS.note(
                "hashes",
                f"{name}: replicas hash blocks differently ({ways}): each way costs a hash chain, "
                "and they cannot share a pool",
                "the same PYTHONHASHSEED, --prefix-caching-hash-algo and --block-size for all",
            )
