"""Whether a Redis can be used as our store: what is asked of it when it is opened."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from router.base.errors import StoreRefused
from router.base.messages import SCHEMA
from router.cluster.redis_connection import RedisConnection


class StoreFacts(Struct, frozen=True, kw_only=True):
    """What was found at `open`."""

    address: str
    server: str  # redis, valkey
    version: str
    incarnation: str  # another one: Redis was emptied in between


async def check_memory(connection: RedisConnection) -> None:
    """Ask what happens when memory is full; refuse to be evicted."""
    (reply,) = await connection.ask_all([("INFO", "memory")])
    if not isinstance(reply, bytes):  # the ACL user may not ask
        return
    lines = (line.partition(":") for line in reply.decode(errors="replace").splitlines())
    info: dict[str, Any] = {name: value for name, _, value in lines}
    max_bytes, policy = int(info.get("maxmemory", 0)), info.get("maxmemory_policy", "")
    if max_bytes and policy.startswith("allkeys"):
        raise StoreRefused(
            f"maxmemory-policy {policy} may evict the table of holders, and blocks would "
            "be credited to others: set it to noeviction, or use a Redis of its own"
        )


def other_schema(found: bytes, base: str, namespace: str) -> StoreRefused:
    """Return the error for a namespace of another schema, with what to do about it."""
    text = found.decode(errors="replace")
    if text.isdigit() and int(text) < SCHEMA:
        advice = f"stop the older routers and delete the keys {base}*, or choose another"
    elif text.isdigit():
        advice = "update this router, or choose another"
    else:
        advice = "another program uses the key: choose another"
    return StoreRefused(
        f"namespace {namespace!r} in Redis has schema {text}, this router has {SCHEMA}: "
        f"{advice} redis.namespace"
    )
