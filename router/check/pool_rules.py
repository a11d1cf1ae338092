"""What follows from what was seen of the Mooncake master. Pure: the hints name engines' flags."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from router.check.findings import Finding
from router.check.seen import PatternSeen, PoolSeen, ReplicaSeen
from router.check.text import size

CONNECTOR_FLAG: Final = (
    '--kv-transfer-config \'{"kv_connector": "MooncakeStoreConnector", "kv_role": '
    '"kv_both", "kv_load_failure_policy": "recompute"}\''
)


def of_pool(seen: PoolSeen, replicas: Sequence[ReplicaSeen]) -> Iterator[Finding]:
    """Judge the Mooncake master, and who takes part."""
    if seen.error is not None:
        yield Finding(
            "pool",
            "reachable",
            "error",
            seen.error,
            "--mooncake names the master's --metrics_port (9003 by default), not its --rpc_port",
        )
        return
    yield Finding("pool", "reachable", "ok", seen.url)
    yield from _contents(seen)
    for model in seen.models:
        yield _pattern(model, seen)
    yield from _members(replicas)
    yield _master_events(seen)
    yield Finding(
        "pool",
        "load failures",
        "note",
        "what engines do when an object vanishes cannot be seen from here; by default the client "
        "gets a 500",
        '"kv_load_failure_policy": "recompute" in --kv-transfer-config',
    )


def _contents(seen: PoolSeen) -> Iterator[Finding]:
    num = seen.num_objects or 0
    limit = f" of {size(seen.max_bytes)}" if seen.max_bytes else ""
    text = f"{num:,} objects, {size(seen.used_bytes or 0)}{limit}"
    evicted = f", {seen.num_evicted:,} evicted so far" if seen.num_evicted else ""
    if seen.max_bytes == 0 or seen.num_segments == 0:
        yield Finding(
            "pool",
            "contents",
            "warning",
            "no engine gives it memory: nothing can be stored",
            f"{CONNECTOR_FLAG}, and global_segment_size in mooncake.json",
        )
        return
    yield Finding("pool", "contents", "ok", text + evicted)
    if seen.list_error is not None:
        yield Finding(
            "pool",
            "keys",
            "warning",
            f"not listed: {seen.list_error}",
            "what was stored before a router starts is then unknown; --wait longer?",
        )


def _pattern(model: PatternSeen, seen: PoolSeen) -> Finding:
    if model.text is None:
        level = "ok" if not seen.num_objects else "note"
        text = f"{model.model}: nothing of it is there yet, or its keys are not known"
        hint = "" if level == "ok" else "a prompt through a router shows what its keys look like"
        return Finding("pool", "keys", "ok" if level == "ok" else "note", text, hint)
    ranks = f", {model.num_ranks} objects a block" if model.num_ranks > 1 else ""
    each = f", {size(round(model.bytes_per_token))} a token" if model.bytes_per_token else ""
    text = f"{model.model}: {model.num_blocks:,} blocks{ranks}{each}, {model.text}@DIGEST"
    return Finding("pool", "keys", "ok", text)


def _members(replicas: Sequence[ReplicaSeen]) -> Iterator[Finding]:
    there = [replica for replica in replicas if replica.error is None]
    known = [r.name for r in there if r.has_pool_connector or any(k.num_pooled for k in r.ranks)]
    unknown = [r.name for r in there if r.name not in known and r.reads_pool is None]
    told_off = [r.name for r in there if r.reads_pool is False]
    if known:
        yield Finding("pool", "members", "ok", f"take part: {', '.join(known)}")
    if unknown:
        yield Finding(
            "pool",
            "members",
            "note",
            f"nothing shows that they take part: {', '.join(unknown)}; taken for members until "
            "fetches fail to happen",
            f"{CONNECTOR_FLAG}; or `pool: false` for the replica",
        )
    if told_off:
        yield Finding("pool", "members", "ok", f"do not, as configured: {', '.join(told_off)}")
    algorithms = Counter(
        rank.algorithm
        for replica in there
        if replica.reads_pool is not False
        for rank in replica.ranks
        if rank.has_handshake and rank.is_verified
    )
    if "warmroute" in algorithms:
        yield Finding(
            "pool",
            "hashes",
            "warning",
            "engines whose hashes cannot be computed cannot be matched with the pool's keys",
            "PYTHONHASHSEED=SEED for the engines and --hash-seeds SEED here",
        )


def _master_events(seen: PoolSeen) -> Finding:
    if seen.events_configured and seen.events_reach != "open":
        return Finding(
            "pool",
            "events",
            "error",
            f"the master's event stream does not answer ({seen.events_reach})",
            "see --mooncake-events; most builds of mooncake_master have no such stream",
        )
    if seen.events_configured:
        return Finding("pool", "events", "ok", "followed")
    if seen.publishes_events:
        return Finding(
            "pool",
            "events",
            "note",
            "the master publishes its events, and they are not followed",
            "--mooncake-events tcp://HOST:PORT: evictions are then known at once",
        )
    return Finding("pool", "events", "ok", "none: evictions are found by listing and verifying")
