"""These tests run on uvloop, as `warmroute serve` does."""

from tests.faults.conftest import pytest_asyncio_loop_factories

__all__ = ["pytest_asyncio_loop_factories"]
