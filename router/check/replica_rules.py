"""What follows from what was seen of replicas. Pure: the hints name the engine's own flags."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from router.check.event_rules import of_events
from router.check.findings import Finding, Level
from router.check.seen import ModelSeen, ReplicaSeen


def of_replica(seen: ReplicaSeen) -> Iterator[Finding]:
    """Judge one replica."""
    subject = f"replica {seen.name}"
    if seen.order != "none":
        yield _order(subject, seen)
    if seen.order == "remove":
        return
    if seen.error is not None:
        yield Finding(subject, "reachable", "error", seen.error, _not_there(seen.error))
        return
    added = " (added at an admin API)" if seen.is_added else ""
    yield Finding(subject, "reachable", "ok", seen.url + added)
    yield _engine(subject, seen)
    for model in seen.models:
        yield from _model(subject, model)
    yield _capacity(subject, seen)
    if seen.prefix_caching is False:
        yield Finding(
            subject,
            "prefix caching",
            "warning",
            "off: every prompt is computed from its first token",
            "start the engine without --no-enable-prefix-caching",
        )
    elif seen.prefix_caching:
        yield Finding(subject, "prefix caching", "ok", "on")
    yield from of_events(subject, seen)


def _order(subject: str, seen: ReplicaSeen) -> Finding:
    if seen.order == "remove":
        text, hint = "an operator took it out", f"warmroute replicas add {seen.url}"
    else:
        text = "it drains: an operator wants no new requests there"
        hint = f"warmroute replicas undrain {seen.name}"
    return Finding(subject, "orders", "warning" if not seen.is_added else "note", text, hint)


def _not_there(error: str) -> str:
    if "engine.api_key_file" in error:
        return "--engine-api-key-file FILE"
    if "refused" in error or "silent" in error:
        return "is it running, is this its --host and --port, does a firewall lie between?"
    return ""


def _engine(subject: str, seen: ReplicaSeen) -> Finding:
    version = f"version {seen.version}" if seen.version else "does not tell its version"
    ranks = f", {seen.num_ranks} data-parallel ranks" if seen.num_ranks > 1 else ""
    level: Level = "ok" if seen.version else "note"
    return Finding(subject, "engine", level, version + ranks)


def _capacity(subject: str, seen: ReplicaSeen) -> Finding:
    if seen.block_size is None or seen.num_blocks is None:
        return Finding(
            subject,
            "cache",
            "note",
            "it does not say how large its cache is: guessed",
            "is its /metrics reachable? (--disable-log-stats hides it)",
        )
    num_tokens = seen.block_size * seen.num_blocks
    each = " per rank" if seen.num_ranks > 1 else ""
    text = f"{seen.num_blocks:,} blocks of {seen.block_size} tokens{each}: {num_tokens:,} tokens"
    return Finding(subject, "cache", "ok", text)


def _model(subject: str, seen: ModelSeen) -> Iterator[Finding]:
    longest = f", up to {seen.max_model_len:,} tokens" if seen.max_model_len else ""
    adapters = f", {seen.num_adapters} adapters" if seen.num_adapters else ""
    yield Finding(subject, "model", "ok", f"{seen.id}{longest}{adapters}")
    if not seen.is_loaded:
        yield Finding(
            subject,
            "tokenizer",
            "warning",
            f"{seen.source}: not loaded in time",
            f"a slow or unreachable hub? Name a directory: --tokens-models {seen.id}=DIRECTORY; "
            "or --wait longer",
        )
    elif seen.engine_only is not None:
        yield Finding(
            subject,
            "tokenizer",
            "note",
            f"the engine's, over HTTP for each prompt: {seen.engine_only}",
            f"where the files are elsewhere: --tokens-models {seen.id}=DIRECTORY",
        )
    elif seen.is_same is False:
        yield Finding(
            subject,
            "tokenizer",
            "error",
            f"{seen.source}: other tokens than the engine's for a sample chat",
            "was the engine started with --chat-template or another --tokenizer? "
            f"--tokens-chat-templates {seen.id}=FILE, --tokens-models {seen.id}=DIRECTORY",
        )
    else:
        proof = "as the engine's, by a sample chat" if seen.is_same else "not compared"
        yield Finding(subject, "tokenizer", "ok", f"local, {seen.source} ({proof})")


def among_replicas(replicas: Sequence[ReplicaSeen]) -> Iterator[Finding]:
    """Judge what only several replicas can have wrong."""
    yield from _twins(replicas)
    yield from _publishers_shared(replicas)
    by_model: dict[str, list[ReplicaSeen]] = defaultdict(list)
    for replica in replicas:
        for model in replica.models:
            by_model[model.id].append(replica)
    for name, serving in by_model.items():
        contracts = {
            (rank.algorithm, rank.seed, rank.block_size)
            for replica in serving
            for rank in replica.ranks
            if rank.is_verified and rank.has_handshake
        }
        if len(contracts) > 1:
            ways = "; ".join(f"{a}, seed {s!r}, {b} tokens" for a, s, b in sorted(contracts))
            yield Finding(
                "replicas",
                "hashes",
                "note",
                f"{name}: replicas name blocks differently ({ways}): each way costs a hash chain, "
                "and they cannot share a pool",
                "the same PYTHONHASHSEED, --prefix-caching-hash-algo and --block-size for all",
            )


def _twins(replicas: Sequence[ReplicaSeen]) -> Iterator[Finding]:
    """Find one engine behind two addresses: it started in the same millisecond with all alike."""
    seen: dict[tuple[object, ...], ReplicaSeen] = {}
    for replica in replicas:
        if replica.error is not None or not replica.ranks or replica.started_s is None:
            continue
        mark = (replica.started_s, replica.version, replica.ranks[0].endpoint)
        first = seen.setdefault(mark, replica)
        if first is not replica:
            yield Finding(
                "replicas",
                "addresses",
                "error",
                f"{first.name} and {replica.name} are the same engine",
                "name it once: its load would be counted in halves",
            )


def _publishers_shared(replicas: Sequence[ReplicaSeen]) -> Iterator[Finding]:
    owner: dict[str, ReplicaSeen] = {}
    for replica in replicas:
        for rank in replica.ranks:
            first = owner.setdefault(rank.endpoint, replica)
            if first is not replica and first.started_s != replica.started_s:
                yield Finding(
                    "replicas",
                    "events",
                    "error",
                    f"{first.name} and {replica.name} have the same event endpoint, "
                    f"{rank.endpoint}: one would be credited with the other's cache",
                    "engines on one machine need different ports in --kv-events-config",
                )
