"""System messages behind a conversation's first message, sent as the user's.

Some chat templates refuse a system message there. The engine then joins all of them in front
(`/v1/messages`) or answers 400 (chats), so a reminder in each turn changes the prompt's head.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw, Struct

from router.api.anthropic import BILLING_HEADER, TOOL_CHANGES
from router.api.body import address_of

_SYSTEM: Final = b'"system"'
_KEPT: Final = tuple(word.encode() for word in (BILLING_HEADER, *TOOL_CHANGES))
"""Engines read these in a system message only."""


class _AnyMessage(Struct):
    role: Raw = Raw(b"")
    content: Raw = Raw(b"")


class _Messages(Struct):
    messages: list[_AnyMessage]


_DECODER: Final = msgspec.json.Decoder(_Messages)


def later_system_as_user(body: bytes) -> bytes:
    """Give later system messages the role `user`; without any it is `body` itself.

    Those in front of the first other message stay. No other byte changes.
    """
    if _SYSTEM not in body:
        return body
    try:
        messages = _DECODER.decode(body).messages
    except (msgspec.DecodeError, RecursionError):
        return body  # its reader says what is wrong
    parts: list[bytes] = []
    end, is_later = 0, False
    for role, content in ((each.role, bytes(each.content)) for each in messages):
        if bytes(role) != _SYSTEM:
            is_later = True
        elif is_later and not any(word in content for word in _KEPT):
            start = address_of(role) - address_of(body)
            parts += (body[end:start], b'"user"')
            end = start + len(_SYSTEM)
    return b"".join([*parts, body[end:]]) if parts else body
