"""Transfers of KV from one emulated replica to another: the protocols without the data.

A producer keeps the KV of a prompt until a consumer has read it. A consumer asks the producer over
HTTP, and waits. A request that would crash or hang a real engine gets an error that names the
field, and is noted in `wrong`.

    mooncake   The producer's HTTP port is its bootstrap server, too (`/query`). Only a request that
               ended for its length is sent. A consumer waits for it, `MOST_S` at most.
    nixl       The producer's answer says where to read; the halves are sequential.
    nixl_push  The same, but the producer writes to the consumer with the same request id.

Source: vLLM 0.32.0, kv_connector/v1/mooncake/mooncake_connector.py, nixl/pull_scheduler.py and
nixl/push_worker.py.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from typing import Any, Final, Literal

import aiohttp

from loadtest.emulator.wire import ApiError

Connector = Literal["none", "mooncake", "nixl", "nixl_push"]

MOST_S: Final = 480.0
_PROMPT: Final = ("transfer_id", "remote_engine_id", "remote_bootstrap_addr")
_NIXL: Final = ("remote_block_ids", "remote_engine_id", "remote_request_id", "remote_host")


class Transfers:
    """One replica's side of transfers; `kv_role`: producer, consumer or both."""

    def __init__(self, connector: Connector, kv_role: str, num_ranks: int) -> None:
        self._connector = connector
        self._kv_role = kv_role
        self.done: dict[str, asyncio.Future[list[int] | None]] = {}
        self.engine_ids = [secrets.token_hex(8) for _ in range(num_ranks)]
        self.wrong: list[str] = []
        self.loses = False  # the KV it keeps, as after a restart

    @property
    def pinned(self) -> list[str]:
        """Ids of prompts that were computed and not read."""
        return [id for id, done in self.done.items() if done.done() and done.result() is not None]

    def query(self) -> dict[str, Any]:
        """Answer as a bootstrap server."""
        return {
            str(rank): {"engine_id": id, "worker_addr": {"0": {"0": "tcp://127.0.0.1:1"}}}
            for rank, id in enumerate(self.engine_ids)
        }

    def check(self, body: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Read a request's parameters; None: it transfers nothing.

        Raises:
            ApiError: They would crash or hang an engine.
        """
        params = body.get("kv_transfer_params")
        if not isinstance(params, dict) or self._connector == "none":
            return None
        if params.get("do_remote_prefill") and self._kv_role == "producer":
            self._refuse("do_remote_prefill at a producer")
        if params.get("do_remote_decode") and self._kv_role == "consumer":
            self._refuse("do_remote_decode at a consumer")
        if params.get("do_remote_prefill"):
            needed = _PROMPT if self._connector == "mooncake" else _NIXL
            for name in needed:
                if not params.get(name):
                    self._refuse(f"no {name} at a consumer")
            return params
        if params.get("do_remote_decode"):
            if self._connector == "mooncake" and not params.get("transfer_id"):
                self._refuse("no transfer_id at a producer")
            if body.get("stream"):
                self._refuse("stream at a producer")
            return params
        return None

    def begin(self, params: Mapping[str, Any], request_id: str) -> str:
        """Start to compute a prompt for another replica; return its id."""
        id = str(params.get("transfer_id") or secrets.token_hex(8))
        if self._connector == "nixl_push":
            id = request_id
            if id in self.done:
                self._refuse("two prompts of one request id")
        self._slot(id)
        return id

    def end(self, id: str, prompt: list[int] | None) -> None:
        """Store a prompt's KV; None: there is none, and the consumer goes on waiting."""
        if prompt is None or self.loses:
            self.done.pop(id, None)
        elif not self._slot(id).done():
            self._slot(id).set_result(prompt)

    def answer(self, id: str, url: str, num_cached_tokens: int) -> dict[str, Any] | None:
        """Write the transfer parameters of a producer's answer; None: it has none."""
        if not self._connector.startswith("nixl"):
            return None
        host, _, port = url.removeprefix("http://").partition(":")
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1, 2, 3]],
            "remote_engine_id": self.engine_ids[0],
            "remote_request_id": id,
            "remote_host": host,
            "remote_port": int(port),
            "tp_size": 1,
            "remote_prefill_cached_tokens": num_cached_tokens,
            "transfer_mode": "push" if self._connector == "nixl_push" else "pull",
        }

    async def give(self, id: str, engine_id: str) -> list[int]:
        """Wait for a prompt's KV, and release it.

        Raises:
            ApiError: It belongs to another engine.
        """
        if engine_id not in self.engine_ids:
            self._refuse(f"remote_engine_id {engine_id} is not here")
        if self.loses:
            raise ApiError(500, "gone", type="InternalServerError")
        async with asyncio.timeout(MOST_S):
            while True:
                found = await asyncio.shield(self._slot(id))
                if found is not None:
                    self.done.pop(id, None)
                    return found

    def _slot(self, id: str) -> asyncio.Future[list[int] | None]:
        return self.done.setdefault(id, asyncio.get_running_loop().create_future())

    async def read(self, params: Mapping[str, Any], prompt: list[int], request_id: str) -> None:
        """Read a prompt's KV from its producer, or have it written.

        Raises:
            ApiError: It is gone, or belongs to another prompt.
        """
        if self._connector == "mooncake":
            url, id = params["remote_bootstrap_addr"], params["transfer_id"]
        else:
            url = f"http://{params['remote_host']}:{params['remote_port']}"
            is_push = self._connector == "nixl_push"
            id = request_id if is_push else params["remote_request_id"]
        asked = {"id": id, "engine_id": params["remote_engine_id"]}
        try:
            async with aiohttp.ClientSession() as client:
                async with client.post(f"{url}/emulator/transfer", json=asked) as answer:
                    found = await answer.json() if answer.status == 200 else None
        except (aiohttp.ClientError, TimeoutError) as exc:
            raise ApiError(500, "KV load failed", type="InternalServerError") from exc
        if found is None:
            raise ApiError(500, "KV load failed", type="InternalServerError")
        if found != prompt:
            self._refuse("another prompt was computed")

    def _refuse(self, what: str) -> None:
        self.wrong.append(what)
        raise ApiError(500, what, type="InternalServerError")
