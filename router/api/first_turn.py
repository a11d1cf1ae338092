"""A conversation's beginning: what all of its requests have in common, as a digest.

That is all messages before the first answer. Of the system's only the first characters count: what
clients write behind them (a date, the state of a repository) may differ from turn to turn. Texts
are cut, so that a request costs some microseconds, however long its messages are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Final

import xxhash

from router.api.anthropic_blocks import BILLING_HEADER
from router.api.part_digests import FIELDS, SYSTEM_ROLES, items_of

_SYSTEM_CHARS: Final = 512
_END_CHARS: Final = 512  # of each end of a user's text
_MAX_ITEMS: Final = 32  # messages, parts of one, fields of a part
_MAX_TEXTS: Final = 64


def digest_first_turn(path: str, body: Mapping[str, Any]) -> int | None:
    """Digest all that comes before the first answer; None: there is no user's message in it."""
    items = items_of(path, body)
    if items is None:
        return None
    texts = [_system(text) for text in _texts(body.get(FIELDS[path][1]))]
    has_user = False
    for item in items[:_MAX_ITEMS]:
        role = item.get("role") if type(item) is dict else None
        if role == "user":
            has_user = True
            texts += map(_both_ends, _texts(item.get("content")))
        elif type(role) is str and role in SYSTEM_ROLES:
            texts += map(_system, _texts(item.get("content")))
        else:
            break
        if len(texts) >= _MAX_TEXTS:
            break
    if not has_user:
        return None
    return xxhash.xxh3_64_intdigest("\0".join(texts).encode(errors="surrogatepass"))


def _texts(content: object) -> Iterable[str]:
    """Return a content's texts; of other parts what tells them apart: an image's address, say."""
    if isinstance(content, str):
        return (content,)
    return islice(_all_texts(content), _MAX_TEXTS) if type(content) is list else ()


def _all_texts(parts: list[object]) -> Iterator[str]:
    for part in parts[:_MAX_ITEMS]:
        if isinstance(part, str):
            yield part
        elif type(part) is dict and isinstance(part.get("text"), str):
            yield part["text"]
        elif type(part) is dict:
            for value in islice(part.values(), _MAX_ITEMS):
                inner = islice(value.values(), _MAX_ITEMS) if type(value) is dict else (value,)
                yield from (each for each in inner if isinstance(each, str))


def _system(text: str) -> str:
    if text.startswith(BILLING_HEADER):
        text = text[text.find("\n") + 1 :] if "\n" in text[:_SYSTEM_CHARS] else ""
    return text[:_SYSTEM_CHARS]


def _both_ends(text: str) -> str:
    if len(text) <= 2 * _END_CHARS:
        return text
    return f"{text[:_END_CHARS]}\0{len(text)}\0{text[-_END_CHARS:]}"
