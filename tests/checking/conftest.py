"""A Redis for the checks that need one."""

from tests.redis_servers import start_redis

__all__ = ["start_redis"]
