"""`/v1/realtime` as vLLM 0.32 speaks it, without a model: each piece of audio becomes a word.

Source: vllm/entrypoints/speech_to_text/realtime/connection.py. Where the model cannot do it vLLM
has no such route, and its server refuses the WebSocket with 403.
"""

from __future__ import annotations

import base64
import binascii
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
                await session.take(message.data)
        finally:
            self._replica.num_in_flight -= 1
        return ws


class _Session:
    def __init__(self, ws: web.WebSocketResponse, models: list[str]) -> None:
        self._ws = ws
        self._models = models
        self._is_validated = False
        self._is_generating = False
        self._words: list[str] = []

    async def send(self, type_: str, **fields: Any) -> None:
        await self._ws.send_str(orjson.dumps({"type": type_, **fields}).decode())

    async def take(self, text: str) -> None:
        """Do as an event says, or say why not."""
        try:
            event = orjson.loads(text)
        except orjson.JSONDecodeError:
            return await self._fail("Invalid JSON", "invalid_json")
        match event.get("type"):
            case "session.update":
                model = event.get("model")
                if model is None:
                    return await self._fail("Missing required field: model", "invalid_event")
                if model not in self._models:
                    text = f"The model `{model}` does not exist."
                    return await self._fail(text, "model_not_found")
                self._is_validated = True
            case "input_audio_buffer.append":
                await self._hear(event)
            case "input_audio_buffer.commit":
                if not self._is_validated:
                    return await self._fail("Model not validated.", "model_not_validated")
                if not event.get("final"):
                    self._is_generating = True
                elif self._is_generating:
                    await self._end()
            case other:
                await self._fail(f"Unknown event type: {other}", "unknown_event")
        return None

    async def _hear(self, event: dict[str, Any]) -> None:
        try:
            audio = base64.b64decode(event["audio"], validate=True)
        except (KeyError, TypeError, binascii.Error):
            return await self._fail("Invalid audio data", "invalid_audio")
        word = f" {len(audio)}"
        self._words.append(word)
        if self._is_generating:
            await self.send("transcription.delta", delta=word)
        return None

    async def _end(self) -> None:
        num = len(self._words)
        usage = {"prompt_tokens": 3 * num, "completion_tokens": num, "total_tokens": 4 * num}
        await self.send("transcription.done", text="".join(self._words), usage=usage)
        self._words.clear()
        self._is_generating = False

    async def _fail(self, message: str, code: str) -> None:
        await self.send("error", error=message, code=code)
