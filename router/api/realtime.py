"""The events of `/v1/realtime` that routing needs: which model is named, what was counted.

A WebSocket of JSON texts. The engine begins with `session.created`; the client names the model in
`session.update`, sends audio and commits it; the engine answers with `transcription.delta` and
`transcription.done`, which has the usage, or with `error`. Source: vLLM 0.32.0,
entrypoints/speech_to_text/realtime (connection.py, protocol.py). OpenAI's API names the model in
the query: `?model=`.
"""

from __future__ import annotations

import secrets
import time
from typing import Final, Literal

import msgspec
import orjson
from msgspec import Struct

from router.api.usage import Usage

PATH: Final = "/v1/realtime"
_DONE: Final = '"transcription.done"'
_UPDATE: Final = '"session.update"'
_CREATED: Final = '"session.created"'


class _Update(Struct):
    type: Literal["session.update"]
    model: str | None = None


class _Done(Struct):
    type: Literal["transcription.done"]
    usage: Usage | None = None


_decode_update = msgspec.json.Decoder(_Update).decode
_decode_done = msgspec.json.Decoder(_Done).decode


def model_of(data: str | bytes, *, is_plain: bool = True) -> str | None:
    """Return the model that a client's frame names, "" if it should and does not; None: no matter.

    What cannot be read is for the engine to refuse. `is_plain`: the type is looked for as clients
    write it; False: however JSON lets it be written, which costs reading every frame.
    """
    if isinstance(data, bytes) or (is_plain and _UPDATE not in data):
        return None
    try:
        return _decode_update(data).model or ""
    except (msgspec.DecodeError, RecursionError):
        return None


def usage_of(data: str | bytes) -> Usage | None:
    """Read what an engine's frame says of an utterance that is done; None: it is another."""
    if isinstance(data, bytes) or _DONE not in data:
        return None
    try:
        return _decode_done(data).usage
    except (msgspec.DecodeError, RecursionError):
        return None


def is_created(data: str | bytes) -> bool:
    """Return whether an engine's frame is the first of a session."""
    return isinstance(data, str) and _CREATED in data


def created() -> str:
    """Write the first event of a session as the engine would."""
    fields = {"type": "session.created", "id": f"sess-{secrets.token_hex(16)}"}
    return orjson.dumps(fields | {"created": int(time.time())}).decode()


def error_text(message: str, code: str) -> str:
    """Write an error as the engine does."""
    return orjson.dumps({"type": "error", "error": message, "code": code}).decode()
