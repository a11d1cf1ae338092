"""The connector of one emulated replica to an emulated pool, over HTTP.

Source of the rules: vllm/distributed/kv_transfer/kv_connector/v1/mooncake/store, 0.32.0. A look-up
takes the whole chain from block 0. Prompts are saved, replies are not. A block that is in the pool
is not written again and gives no event. A pool that does not answer counts as empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import aiohttp
import orjson

_TIMEOUT_S = 5.0


class PoolClient:
    """Names blocks by their digests.

    Args:
        url: Of an emulated pool's master.
        model: The model's name in the keys of objects.
        ms_per_token: Time to fetch a token's KV.
    """

    def __init__(self, url: str, model: str, *, ms_per_token: float) -> None:
        self.url = url.rstrip("/")
        self.head = f"{model}@tp_rank:0@pcp0@dcp0@pp_rank:0@group:0@"
        self._ms_per_token = ms_per_token
        self._session: aiohttp.ClientSession | None = None

    async def leading(self, digests: Sequence[bytes]) -> int:
        """Count the leading blocks that the pool has."""
        found = await self._ask("/emulator/leading", digests) if digests else 0
        return found if isinstance(found, int) else 0

    async def put(self, digests: Sequence[bytes]) -> list[int]:
        """Store blocks; return the positions of those that were not there."""
        new = await self._ask("/emulator/put", digests) if digests else []
        known = set(new) if isinstance(new, list) else set()
        return [
            position for position, digest in enumerate(digests) if self.head + digest.hex() in known
        ]

    async def remove_all(self) -> None:
        """Empty the pool, for everybody."""
        await self._ask("/emulator/remove_all", ())

    def fetch_s(self, num_tokens: int) -> float:
        """Return how long it takes to fetch so many tokens' KV."""
        return max(0, num_tokens) * self._ms_per_token * 1e-3

    async def close(self) -> None:
        """Close the connections; they open again when something is asked."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _ask(self, path: str, digests: Sequence[bytes]) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_TIMEOUT_S))
        body = orjson.dumps([self.head + digest.hex() for digest in digests])
        try:
            async with self._session.post(self.url + path, data=body) as response:
                return orjson.loads(await response.read())
        except (TimeoutError, aiohttp.ClientError, ValueError):
            return None
