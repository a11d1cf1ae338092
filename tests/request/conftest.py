"""These tests run on uvloop, as `warmroute serve` does."""

from tests.faults.conftest import polled_often, pytest_asyncio_loop_factories

__all__ = ["polled_often", "pytest_asyncio_loop_factories"]
