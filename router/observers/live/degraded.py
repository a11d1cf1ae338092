"""What does not work as it should, in words: for `warmroute status` and the live page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from router.index.candidate_stream import StreamReason
from router.replicas.candidate_state import ON_PURPOSE

State = dict[str, Any]

LEAST_REQUESTS: Final = 20
MOST_FAILED: Final = 0.05
"""Of the last minute: from this share on, and from so many requests on, failures are degraded."""


def degraded(state: State) -> list[str]:
    """List what is degraded, one line each; empty: all is well.

    Args:
        state: The sections of a state line.
    """
    return [" ".join(text.split()) for text in _found(state)]


def _found(state: State) -> Iterator[str]:
    replicas = state["replicas"]
    yield from _failing(state.get("recent"))
    for name, reason in state["router"]["replaced_policies"]:
        yield f"policy {name} fails, and least_loaded decides in its place: {reason}"
    records = state.get("records")
    if records is not None and records["reason"] is not None:
        yield f"decision records are lost: {records['file']}: {records['reason']}"
    if not replicas["total"]:
        yield "no replica is known"
    for each in replicas["unserved"]:
        yield f"no replica takes requests for {each['model']}: {each['reason']}"
    for each in replicas["missing"]:
        yield f"replica {each['name']} is not discovered: {each['reason']}"
    for each in replicas["shown"]:
        if each["state"] not in ("up", *ON_PURPOSE):
            yield f"replica {each['id']} is {each['state']}: {each['reason']}"
        elif each["has_several_engines"]:
            yield (
                f"several engines answer at the address of {each['id']} in turn, so predictions "
                "are wrong: give each its own URL; for a Kubernetes Service discovery.kubernetes"
            )
        elif not each["caches_prefixes"]:
            yield (
                f"prefix caching is off at {each['id']}: each prompt is computed from its first "
                "token; start the engine without --no-enable-prefix-caching"
            )
        elif each["cache"] != "exact" and not each["awaits_events"]:
            yield f"the cache of {each['id']} is {each['cache']}: {_why_not_exact(each)}"
    for each in state["tokenizers"]:
        yield f"the tokenizer of {each['model']}: {each['reason']}"
    for each in state["sources"]:
        if each["reason"]:
            yield f"{each['name']} is not followed: {each['reason']}"
    for host in state["router"]["unresolved"]:
        yield f"host name {host} does not resolve: its last addresses are used"
    for pool in state["pools"]:
        if pool["state"] != "up":
            yield f"the pool {pool['name']} cannot be reached"
    sharing = state["sharing"]
    if sharing is not None and sharing["state"] != "shared":
        yield f"nothing is shared with other routers: {sharing['reason']}"


def _failing(recent: State | None) -> Iterator[str]:
    """Say how many requests of the last minute failed, if that is not a few of many."""
    if recent is None or recent["requests"] < LEAST_REQUESTS:
        return
    share = recent["failed"] / recent["requests"]
    if share >= MOST_FAILED:
        reasons = ", ".join(f"{what} ({num:,})" for what, num in recent["failures"])
        yield (
            f"{recent['failed']:,} of {recent['requests']:,} requests of the last minute failed "
            f"({share:.0%}): {reasons}"
        )


def _why_not_exact(replica: State) -> str:
    if replica["cache_reason"] != StreamReason.NO_EVENTS:
        return replica["cache_reason"] or "no reason is known"
    if not replica["publishes_events"]:
        return "its engine publishes no KV events; `warmroute check` names the flag"
    return "no KV event has come, although it computed prompts; `warmroute check` says what to do"
