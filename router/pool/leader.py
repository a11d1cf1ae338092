"""Find the master that serves, if a pool has several.

One master is the leader and answers; the others stand by. What the leader had is known to the next
one only with `--enable_oplog` or a snapshot, so its keys are listed again after a failover.
Source: MasterAdminServer in mooncake-store/src/master_admin_service.cpp.
"""

from __future__ import annotations

import asyncio
from typing import Final

from router.base.errors import PoolError, PoolGone
from router.pool.master import MasterApi

_SERVING: Final = "serving"
_DEADLINE_S: Final = 1.0  # for a master's state: a silent standby must not delay the others


async def find_leader(api: MasterApi) -> bool:
    """Turn to the master that serves; return whether it is another one than before.

    A single master serves. While the present leader serves, no other master is asked.

    Raises:
        PoolGone: none serves.
        PoolError: several serve: they are several pools, or an election is under way.
    """
    if len(api.urls) == 1:
        return False
    if api.has_turned and await _state(api, api.url) == _SERVING:
        return False
    states = await asyncio.gather(*(_state(api, url) for url in api.urls))
    by_url = dict(zip(api.urls, states, strict=True))
    serving = [url for url, state in by_url.items() if state == _SERVING]
    if not serving:
        text = ", ".join(f"{url} {state}" for url, state in by_url.items())
        raise PoolGone(f"no Mooncake master serves: {text}")
    if len(serving) > 1:
        raise PoolError(
            f"{' and '.join(serving)} both serve: they are two pools, which need names "
            "(mooncake.pools)"
        )
    is_other = serving[0] != api.url and api.has_turned
    api.turn_to(serving[0])
    return is_other


async def _state(api: MasterApi, url: str) -> str:
    """Return a master's state, or what is wrong with it."""
    try:
        async with asyncio.timeout(_DEADLINE_S):
            return await api.ha_status(url)
    except PoolGone:
        return "does not listen"
    except (PoolError, TimeoutError):
        return "does not answer"
