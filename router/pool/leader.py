"""Which of several masters serves: one is the leader, the others stand by.

    GET /ha_status   text: serving | standby | candidate | recovering | catching_up | ...
    GET /leader      {"present":true,"leader_address":"HOST:PORT","view_version":3}   RPC address
    a standby        answers /metrics (zeros), and 503 to everything about objects

Source: MasterAdminServer in mooncake-store/src/master_admin_service.cpp. What the leader held is
known to the next one only with `--enable_oplog` or a snapshot, so it is listed anew.
"""

from __future__ import annotations

import asyncio
from typing import Final

from router.errors import PoolError, PoolGone
from router.pool.master import MasterApi

_SERVING: Final = "serving"
_DEADLINE_S: Final = 1.0  # for a master's word; a silent standby delays nothing more


async def find_leader(api: MasterApi) -> bool:
    """Turn to the master that serves; return whether that is another one than before.

    With one master there is nothing to find. While the present one serves, no other is asked.

    Raises:
        PoolGone: none serves.
        PoolError: two serve, and are not of one group: they are two pools.
    """
    if len(api.urls) == 1:
        return False
    if api.has_turned and await _state(api, api.url) == _SERVING:
        return False
    states = await asyncio.gather(*(_state(api, url) for url in api.urls))
    serving = [url for url, state in zip(api.urls, states, strict=True) if state == _SERVING]
    if not serving:
        said = ", ".join(f"{url} {state}" for url, state in zip(api.urls, states, strict=True))
        raise PoolGone(f"no Mooncake master serves: {said}")
    leader = serving[0] if len(serving) == 1 else await _newest(api, serving)
    is_other = leader != api.url and api.has_turned
    api.turn_to(leader)
    return is_other


async def _state(api: MasterApi, url: str) -> str:
    """Return what a master says of itself, or what is wrong with it."""
    try:
        async with asyncio.timeout(_DEADLINE_S):
            return await api.ha_status(url)
    except PoolGone:
        return "does not listen"
    except (PoolError, TimeoutError):
        return "does not say"


async def _newest(api: MasterApi, serving: list[str]) -> str:
    """Return the one of the newest view: an old leader may not know yet that it is none."""
    versions: dict[str, int] = {}
    for url in serving:
        try:
            async with asyncio.timeout(_DEADLINE_S):
                version = await api.view_version(url)
        except (PoolError, TimeoutError):
            version = None
        if version is not None:
            versions[url] = version
    newest = max(versions.values(), default=None)
    found = [url for url, version in versions.items() if version == newest]
    if len(found) != 1 or len(versions) != len(serving):
        raise PoolError(
            f"{' and '.join(serving)} both serve: they are two pools, which need names "
            "(NAME=URL, or mooncake.pools)"
        )
    return found[0]
