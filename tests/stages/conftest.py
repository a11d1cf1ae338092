"""These tests run on uvloop, as `warmroute serve` does."""

from tests.faults.conftest import pytest_asyncio_loop_factories
from tests.redis_servers import start_redis

__all__ = ["pytest_asyncio_loop_factories", "start_redis"]
