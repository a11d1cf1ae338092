"""Real Redis servers for the loops."""

from __future__ import annotations

from tests.redis_servers import namespace, shared_redis, start_redis

__all__ = ["namespace", "shared_redis", "start_redis"]
