"""A replica: whether it answers, what it serves, and how it is configured."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from router.base.engines import Role
from router.base.errors import (
    HostUnknown,
    KeyRefused,
    TlsRefused,
    UpstreamError,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from router.check import events, tokenizer
from router.check.finding import Finding, Subject
from router.check.seen import Deadline, Failure, ReplicaSeen
from router.check.tokenizer import Tokenizers
from router.config import Config, bootstrap_of, pool_of
from router.discovery.engine_api import EngineApi
from router.discovery.engine_facts import EngineFacts
from router.replicas.replica import Entry

_TOOLS_S: Final = 5.0  # to render one short chat
_NUM_CONNECTIONS: Final = 8  # two engines behind one address are seen in 99 of 100 checks
_INFO_SHARE: Final = 0.6  # of the time that is left: for an engine's page about itself

# -- look ----------------------------------------------------------------------------------------


async def look(
    entry: Entry, *, config: Config, api: EngineApi, tokenizers: Tokenizers, deadline: Deadline
) -> ReplicaSeen:
    """Discover a replica as a router does; the result has what does not answer."""
    name, url = entry.name, entry.replica.url.rstrip("/")
    seen = ReplicaSeen(
        entry=entry,
        pool=pool_of(entry.replica, config.mooncake.names),
    )
    try:
        async with asyncio.timeout(deadline.left_s):
            facts = await api.facts(name, url)
            starts = await api.starts(name, url, num=_NUM_CONNECTIONS)
            publishers = await api.event_publishers(name, url)
            seen = replace(
                await _with_bootstrap(seen, config, api),
                facts=facts,
                num_engines=max(1, len(starts)),
                publishers=tuple(publishers) if publishers is not None else None,
            )
    except UpstreamError as exc:
        return replace(seen, error=exc.message, failure=_failure(exc))
    except TimeoutError:
        return replace(seen, error=f"{url} did not answer", failure="no answer")
    return await _with_details(seen, facts, config, api, tokenizers, deadline)


async def _with_bootstrap(seen: ReplicaSeen, config: Config, api: EngineApi) -> ReplicaSeen:
    """Ask a prefill replica's bootstrap server for its ranks, if it must have one."""
    replica = seen.entry.replica
    if (replica.role, replica.transfer or config.prefill.transfer) != ("prefill", "mooncake"):
        return seen
    url = bootstrap_of(replica)
    try:
        has_bootstrap = bool(await api.engine_ids(seen.name, url))
    except UpstreamError:
        has_bootstrap = False
    return replace(seen, bootstrap=url, has_bootstrap=has_bootstrap)


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


async def _with_details(
    seen: ReplicaSeen,
    facts: EngineFacts,
    config: Config,
    api: EngineApi,
    tokenizers: Tokenizers,
    deadline: Deadline,
) -> ReplicaSeen:
    """Ask for its configuration, tokenizers, tools and events, all at once."""
    entry, name, url = seen.entry, seen.name, seen.url
    bases = [model for model in facts.models if model.parent is None]
    async with asyncio.TaskGroup() as tg:
        # Not all the time that is left: the pool is looked at afterwards.
        info_s = deadline.at_most(_INFO_SHARE * deadline.left_s)
        asking = tg.create_task(api.server_info(name, url, timeout_s=info_s))
        offering = tg.create_task(
            api.takes_tools(
                name, url, (bases or facts.models)[0].id, timeout_s=deadline.at_most(_TOOLS_S)
            )
        )
        models = [tg.create_task(tokenizers.look(entry, model, facts.version)) for model in bases]
        ranks = [
            tg.create_task(
                events.look(
                    rank,
                    source,
                    entry=entry,
                    facts=facts,
                    config=config,
                    is_pooled=seen.pool is not None,
                    deadline=deadline,
                )
            )
            for rank, source in facts.endpoints(config.events, entry.replica).items()
        ]
    return replace(
        seen,
        info=asking.result(),
        takes_tools=offering.result(),
        models=tuple(task.result() for task in models),
        ranks=tuple(task.result() for task in ranks),
    )


# -- judge ---------------------------------------------------------------------------------------

_HINTS: Final[dict[Failure, str]] = {
    "api key": "--set engine.api_key_file=FILE",
    "unknown host": "is the name correct, and known to DNS or /etc/hosts of this machine?",
    "no answer": "is it running, are --host and --port correct, is there a firewall?",
    "other": "",
}


def judge(seen: ReplicaSeen, config: Config) -> Iterator[Finding]:
    """Judge one replica."""
    subject = Subject(f"replica {seen.name}")
    entry, facts = seen.entry, seen.facts
    if facts is None:
        yield subject.error("reachable", seen.error or "", _HINTS[seen.failure or "other"])
        return
    yield subject.ok("reachable", seen.url)
    if seen.num_engines > 1:
        yield subject.error(
            "address",
            f"{seen.num_engines} engines answer at {seen.url}, in turn: predictions are wrong",
            "give each engine its own --replica URL; for a Kubernetes Service: "
            "discovery.kubernetes",
        )
    yield from _sleep(subject, seen, facts)
    yield _engine(subject, facts)
    if seen.info is None:
        yield subject.note(
            "configuration",
            "its /server_info is slow: connectors, role, drafts and weights are unknown",
            "check again: only the first answer is slow; or use a longer --wait",
        )
    yield from _models(subject, seen, facts)
    yield _capacity(subject, facts)
    yield from _prefix_caching(subject, facts)
    names = config.mooncake.names
    if names and seen.pool is None and entry.replica.pool is not False:
        yield subject.warning(
            "pool",
            f"it names no pool, and there are several ({', '.join(names)}): it counts as "
            "reading none",
            "replicas[].pool: NAME, or false",
        )
    yield from _role(subject, seen, config)
    yield from _speculation(subject, seen, facts)
    yield from events.judge(subject, seen, is_wanted=config.events.enabled)


def _sleep(subject: Subject, seen: ReplicaSeen, facts: EngineFacts) -> Iterator[Finding]:
    if facts.sleep == "paused":
        text = "its engine is paused and gets no requests"
        yield subject.warning("pause", text, f"POST {seen.url}/resume")
    elif facts.sleep != "awake":
        lost = "; it lost its cache" if facts.sleep == "emptied" else ""
        if lost and facts.has_pool_connector:
            lost += "; it emptied the shared pool"
        text = f"its engine sleeps and gets no requests{lost}"
        yield subject.warning("sleep", text, f"POST {seen.url}/wake_up")


def _engine(subject: Subject, facts: EngineFacts) -> Finding:
    ranks = f", {facts.num_ranks} data-parallel ranks" if facts.num_ranks > 1 else ""
    if facts.version:
        return subject.ok("engine", f"version {facts.version}{ranks}")
    return subject.note("engine", f"does not report its version{ranks}")


NO_TOOLS: Final = (
    'agents get 400: "auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser '
    "to be set"
)


def _models(subject: Subject, seen: ReplicaSeen, facts: EngineFacts) -> Iterator[Finding]:
    for model in seen.models:
        length = model.served.max_model_len
        longest = f", up to {length:,} tokens" if length else ""
        num_adapters = sum(other.parent == model.id for other in facts.models)
        adapters = f", {num_adapters} adapters" if num_adapters else ""
        yield subject.ok("model", f"{model.id}{longest}{adapters}")
        yield from tokenizer.judge(subject, model)
    if seen.takes_tools is False:
        yield subject.warning(
            "tools",
            NO_TOOLS,
            "--enable-auto-tool-choice --tool-call-parser PARSER for the engine; "
            "docs/guides/agents.md lists the parser of each model family",
        )


def _capacity(subject: Subject, facts: EngineFacts) -> Finding:
    if facts.block_size is None or facts.num_gpu_blocks is None:
        text = "it does not report its cache size: guessed"
        return subject.note(
            "cache", text, "is its /metrics reachable? (--disable-log-stats hides it)"
        )
    num_tokens = facts.num_cache_tokens or facts.block_size * facts.num_gpu_blocks
    each = " per rank" if facts.num_ranks > 1 else ""
    blocks = f"{facts.num_gpu_blocks:,} blocks of {facts.block_size} tokens{each}"
    return subject.ok("cache", f"{blocks}: {num_tokens:,} tokens")


def _prefix_caching(subject: Subject, facts: EngineFacts) -> Iterator[Finding]:
    if facts.prefix_caching is False:
        yield subject.warning(
            "prefix caching",
            "off: every prompt is recomputed from its first token",
            "start the engine without --no-enable-prefix-caching",
        )
    elif facts.prefix_caching:
        yield subject.ok("prefix caching", "on")


def _role(subject: Subject, seen: ReplicaSeen, config: Config) -> Iterator[Finding]:
    """Compare its configured role with the role that it shows."""
    replica = seen.entry.replica
    role, transfer = replica.role, replica.transfer or config.prefill.transfer
    transfers: Sequence[str] = seen.info.transfers if seen.info is not None else ()
    if seen.seems not in (None, "both", role):
        yield subject.error(
            "role",
            f"it reports role {seen.seems}, but is used as {role}",
            f"replicas: - {{url: {seen.url}, role: {seen.seems}}}; {_partner(seen.seems)}",
        )
    elif role != "both" and transfers and transfer not in transfers:
        yield subject.error(
            "role",
            f"{role} with transfer {transfer}, but its connectors use {' and '.join(transfers)}",
            f"transfer: {transfers[0]}, here and at its partners",
        )
    elif seen.bootstrap is not None and not seen.has_bootstrap:
        yield subject.error(
            "role",
            f"prefill, but no bootstrap server answers at {seen.bootstrap}",
            "bootstrap: http://HOST:PORT of its VLLM_MOONCAKE_BOOTSTRAP_PORT, or another transfer",
        )
    elif role != "both":
        yield subject.ok("role", role)


def _partner(role: Role | None) -> str:
    if role == "prefill":
        return "and role: decode for the replicas that answer its prompts"
    return "and role: prefill for the replicas that compute its prompts"


def _speculation(subject: Subject, seen: ReplicaSeen, facts: EngineFacts) -> Iterator[Finding]:
    """Judge whether it is known that its drafts drop the last block of a hit."""
    eagle = seen.entry.replica.eagle  # configured
    reported = seen.info.eagle if seen.info is not None else None
    shown = reported if reported is not None or facts.speculates else False
    hashes_ahead = any(r.status is not None and r.status.contract.lookahead for r in seen.ranks)
    if hashes_ahead:
        text = "its hashes cover the tokens after a block, so it drops no block"
        if eagle:
            yield subject.note("drafts", f"{text}: eagle has no effect", "remove eagle: true")
        else:
            yield subject.ok("drafts", text)
    elif shown is None and eagle is None:
        yield subject.note(
            "drafts",
            "it speculates, and is taken to drop no block of a hit",
            f"replicas: - {{url: {seen.url}, eagle: true}} if its method is eagle, eagle3 or "
            "mtp (until vLLM 0.32 also dflash, dspark), else eagle: false",
        )
    elif shown is False and eagle and (facts.block_size is not None or reported is False):
        yield subject.warning(
            "drafts",
            "eagle is set, but the engine does not use it: predictions are one block too low",
        )
    elif shown and eagle is not True:
        yield subject.note(
            "drafts",
            "it drops the last block of each hit",
            f"replicas: - {{url: {seen.url}, eagle: true}}",
        )
    elif eagle is not None:
        yield subject.ok("drafts", "drops the last block" if eagle else "drops no block")
