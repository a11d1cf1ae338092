"""`/v1/realtime` as vLLM 0.32 speaks it, without a model: each piece of audio becomes a word.

Source: vllm/entrypoints/speech_to_text/realtime/connection.py. If the model has no such route, the
server refuses the WebSocket with 403.
"""

from __future__ import annotations

import base64
import time
import uuid
from typing import Any

import aiohttp
import orjson
from aiohttp import web

from loadtest.emulator.replica import Replica


class RealtimeRoute:
    """Answers WebSockets."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Speak the protocol until the client leaves."""
        if not self._replica.options.realtime:
            return web.Response(status=403)
        ws = web.WebSocketResponse(compress=False)
        await ws.prepare(request)
        self._replica.num_in_flight += 1
        try:
            session = _Session(ws, self._replica.models)
            await session.send(
                "session.created", id=f"sess-{uuid.uuid4()}", created=int(time.time())
            )
            async for message in ws:
                if message.type is not aiohttp.WSMsgType.TEXT:
                    break
                await session.take(orjson.loads(message.data))
        finally:
            self._replica.num_in_flight -= 1
        return ws


class _Session:
    def __init__(self, ws: web.WebSocketResponse, models: list[str]) -> None:
        self._ws = ws
        self._models = models
        self._is_generating = False
        self._words: list[str] = []

    async def send(self, type_: str, **fields: Any) -> None:
        await self._ws.send_str(orjson.dumps({"type": type_, **fields}).decode())

    async def take(self, event: dict[str, Any]) -> None:
        """Do as an event says, or say why not."""
        match event.get("type"):
            case "session.update":
                model = event.get("model")
                if model is None:
                    await self._fail("Missing required field: model", "invalid_event")
                elif model not in self._models:
                    await self._fail(f"The model `{model}` does not exist.", "model_not_found")
            case "input_audio_buffer.append":
                word = f" {len(base64.b64decode(event['audio']))}"
                self._words.append(word)
                if self._is_generating:
                    await self.send("transcription.delta", delta=word)
            case "input_audio_buffer.commit":
                if event.get("final") and self._is_generating:
                    await self._end()
                else:
                    self._is_generating = not event.get("final")
            case other:
                await self._fail(f"Unknown event type: {other}", "unknown_event")

    async def _end(self) -> None:
        num = len(self._words)
        usage = {"prompt_tokens": 3 * num, "completion_tokens": num, "total_tokens": 4 * num}
        await self.send("transcription.done", text="".join(self._words), usage=usage)
        self._words.clear()
        self._is_generating = False

    async def _fail(self, message: str, code: str) -> None:
        await self.send("error", error=message, code=code)
