"""The routes of an emulated replica.

What must live here: HTTP in, HTTP out, and faults. What must not: the reply, its time and its cache
(replica), the JSON shapes (wire).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import orjson
from aiohttp import web

from loadtest.emulator import metrics
from loadtest.emulator.faults import REQUEST_FAULTS, Fault
from loadtest.emulator.generate import Generate
from loadtest.emulator.replica import Replica
from loadtest.emulator.token_routes import TokenRoutes
from loadtest.emulator.wire import ApiError, parse_body
from router.base.errors import ClientError

MAX_BODY_BYTES = 256 * 1024 * 1024

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class App:
    """Answers requests for one replica.

    Args:
        on_fault: Called with faults that concern the whole replica (restart, kill).
    """

    def __init__(self, replica: Replica, on_fault: Callable[[Fault], None]) -> None:
        self._replica = replica
        self._on_fault = on_fault
        self._hangs_probes = False
        generate = Generate(replica)
        tokens = TokenRoutes(replica)
        self._routes: dict[str, dict[str, Handler]] = {
            "/v1/chat/completions": {"POST": generate.chat},
            "/v1/completions": {"POST": generate.completion},
            "/v1/messages": {"POST": generate.messages},
            "/v1/responses": {"POST": generate.responses},
            "/v1/messages/count_tokens": {"POST": tokens.count_message_tokens},
            "/v1/chat/completions/render": {"POST": tokens.render_chat},
            "/v1/completions/render": {"POST": tokens.render_completion},
            "/v1/models": {"GET": self._models},
            "/tokenize": {"POST": tokens.tokenize},
            "/detokenize": {"POST": tokens.detokenize},
            "/health": {"GET": self._health},
            "/ping": {"GET": self._empty, "POST": self._empty},
            "/load": {"GET": self._load},
            "/version": {"GET": self._version},
            "/metrics": {"GET": self._metrics},
            "/kv_event_sources": {"GET": self._kv_event_sources},
            "/reset_prefix_cache": {"POST": self._reset_prefix_cache},
            "/sleep": {"POST": self._sleep},
            "/wake_up": {"POST": self._wake_up},
            "/is_sleeping": {"GET": self._is_sleeping},
            "/pause": {"POST": self._pause},
            "/resume": {"POST": self._resume},
            "/is_paused": {"GET": self._is_paused},
            "/v1/load_lora_adapter": {"POST": self._load_lora},
            "/v1/unload_lora_adapter": {"POST": self._unload_lora},
            "/query": {"GET": self._query},
            "/emulator/transfer": {"POST": self._transfer},
            "/emulator/faults": {
                "GET": self._list_faults,
                "POST": self._arm_faults,
                "DELETE": self._clear_faults,
            },
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; errors become vLLM's own JSON."""
        response: web.StreamResponse
        try:
            methods = self._routes.get(request.path)
            if methods is None:
                return _json({"detail": "Not Found"}, status=404)
            handler = methods.get(request.method)
            if handler is None:
                response = _json({"detail": "Method Not Allowed"}, status=405)
                response.headers["Allow"] = ", ".join(methods)
                return response
            response = await handler(request)
        except (ApiError, ClientError) as error:
            if isinstance(error, ClientError):
                error = ApiError(error.status, error.message, param=error.param)
            response = web.Response(
                body=error.body, status=error.status, content_type="application/json"
            )
        if not response.prepared:
            response.headers["X-Request-Id"] = request_id(request)
        return response

    async def _health(self, request: web.BaseRequest) -> web.StreamResponse:
        await self._probed()
        return web.Response()

    async def _probed(self) -> None:
        if self._hangs_probes:
            await asyncio.Event().wait()

    async def _empty(self, request: web.BaseRequest) -> web.StreamResponse:
        return web.Response()

    async def _version(self, request: web.BaseRequest) -> web.StreamResponse:
        return _json({"version": self._replica.options.version})

    async def _load(self, request: web.BaseRequest) -> web.StreamResponse:
        return _json({"server_load": self._replica.num_in_flight})

    async def _metrics(self, request: web.BaseRequest) -> web.StreamResponse:
        await self._probed()
        return web.Response(
            body=self._replica.metrics.render(), headers={"Content-Type": metrics.CONTENT_TYPE}
        )

    async def _kv_event_sources(self, request: web.BaseRequest) -> web.StreamResponse:
        sources = {
            str(number): msgspec.to_builtins(rank.publisher.config)
            for number, rank in enumerate(self._replica.ranks, self._replica.options.first_rank)
            if rank.publisher is not None
        }
        return _json(sources)

    async def _models(self, request: web.BaseRequest) -> web.StreamResponse:
        replica = self._replica
        base = replica.options.served_model_names[0]
        root = str(replica.options.model_dir)
        cards = [
            _model_card(replica, name, root, None) for name in replica.options.served_model_names
        ]
        cards += [
            _model_card(replica, name, path, base) for name, (_, path) in replica.loras.items()
        ]
        return _json({"object": "list", "data": cards})

    async def _reset_prefix_cache(self, request: web.BaseRequest) -> web.StreamResponse:
        def asked(name: str) -> bool:
            return request.query.get(name, "").lower() in ("true", "1")

        is_clear = self._replica.reset_prefix_cache(
            preempt=asked("reset_running_requests"), with_tier=asked("reset_external")
        )
        return _json({"success": is_clear})

    async def _sleep(self, request: web.BaseRequest) -> web.StreamResponse:
        level = request.query.get("level", "1")
        if level not in ("0", "1", "2"):
            raise ApiError(400, f"no level of sleep: {level}")
        await self._replica.sleep(int(level))
        return web.Response()

    async def _wake_up(self, request: web.BaseRequest) -> web.StreamResponse:
        self._replica.wake_up()
        return web.Response()

    async def _is_sleeping(self, request: web.BaseRequest) -> web.StreamResponse:
        return _json({"is_sleeping": self._replica.sleep_level is not None})

    async def _pause(self, request: web.BaseRequest) -> web.StreamResponse:
        mode = request.query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            raise ApiError(400, f"no mode of a pause: {mode}")
        clears = request.query.get("clear_cache", "true").lower() in ("true", "1")
        await self._replica.pause(loses_cache=clears)
        return _json({"status": "paused"})

    async def _resume(self, request: web.BaseRequest) -> web.StreamResponse:
        self._replica.resume()
        return _json({"status": "resumed"})

    async def _is_paused(self, request: web.BaseRequest) -> web.StreamResponse:
        return _json({"is_paused": self._replica.is_paused})

    async def _load_lora(self, request: web.BaseRequest) -> web.StreamResponse:
        body = parse_body(await request.read(), request.headers.get("Content-Type", ""))
        name, path = str(body.get("lora_name", "")), str(body.get("lora_path", ""))
        if not self._replica.load_lora(name, path, in_place=body.get("load_inplace") is True):
            message = f"The lora adapter '{name}' has already been loaded."
            raise ApiError(400, message, type="InvalidUserInput")
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_lora(self, request: web.BaseRequest) -> web.StreamResponse:
        body = parse_body(await request.read(), request.headers.get("Content-Type", ""))
        name = str(body.get("lora_name", ""))
        if not self._replica.unload_lora(name):
            raise ApiError(404, f"The lora adapter '{name}' cannot be found.", type="NotFoundError")
        return web.Response(text=f"Success: LoRA adapter '{name}' removed successfully.")

    async def _query(self, request: web.BaseRequest) -> web.StreamResponse:
        return _json(self._replica.transfers.query())

    async def _transfer(self, request: web.BaseRequest) -> web.StreamResponse:
        asked = orjson.loads(await request.read())
        return _json(await self._replica.transfers.give(asked["id"], asked["engine_id"]))

    async def _list_faults(self, request: web.BaseRequest) -> web.StreamResponse:
        faults = self._replica.faults
        return _json({"armed": msgspec.to_builtins(faults.armed()), "num_fired": faults.num_fired})

    async def _arm_faults(self, request: web.BaseRequest) -> web.StreamResponse:
        raw = await request.read()
        try:
            faults = msgspec.json.decode(raw, type=Fault | list[Fault])
        except msgspec.DecodeError as error:
            raise ApiError(400, f"not a fault: {error}") from error
        for fault in faults if isinstance(faults, list) else [faults]:
            self.arm(fault)
        return await self._list_faults(request)

    async def _clear_faults(self, request: web.BaseRequest) -> web.StreamResponse:
        self.clear_faults()
        return await self._list_faults(request)

    def arm(self, fault: Fault) -> None:
        """Make a fault happen, now or to the next requests."""
        if fault.kind in REQUEST_FAULTS:
            self._replica.faults.arm(fault)
            return
        publishers = [rank.publisher for rank in self._replica.ranks if rank.publisher is not None]
        match fault.kind:
            case "slow":
                for rank in self._replica.ranks:
                    rank.engine.slowdown = fault.factor
            case "drop_events":
                for publisher in publishers:
                    publisher.num_to_drop += fault.count or 1
            case "silence_events":
                for publisher in publishers:
                    publisher.silent = True
            case "garbage_events":
                for publisher in publishers:
                    publisher.publish_garbage(fault.count or 1)
            case "hang_probes":
                self._hangs_probes = True
            case "truncate_replay":
                for publisher in publishers:
                    publisher.truncate(fault.num_kept)
            case _:
                self._on_fault(fault)

    def clear_faults(self) -> None:
        """Disarm all faults; lost caches and batches stay lost."""
        self._replica.faults.clear()
        self._hangs_probes = False
        for rank in self._replica.ranks:
            rank.engine.slowdown = 1.0
            if rank.publisher is not None:
                rank.publisher.num_to_drop = 0
                rank.publisher.silent = False


def make_request(
    message: Any, payload: Any, protocol: Any, writer: Any, task: Any
) -> web.BaseRequest:
    """Build aiohttp's request with a body limit fit for long prompts (its own is 1 MiB)."""
    return web.BaseRequest(
        message,
        payload,
        protocol,
        writer,
        task,
        asyncio.get_running_loop(),
        client_max_size=MAX_BODY_BYTES,
    )


def request_id(request: web.BaseRequest) -> str:
    """Return the client's request id, or a new one."""
    return request.headers.get("X-Request-Id") or uuid.uuid4().hex


def _json(value: Any, *, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")


def _model_card(replica: Replica, name: str, root: str, parent: str | None) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": replica.created,
        "owned_by": "vllm",
        "root": root,
        "parent": parent,
        "max_model_len": None if parent is not None else replica.max_model_len,
    }
