"""The messages that a body has in common with earlier ones: parsed once.

An agent sends its whole conversation with every turn, and all but the end of it are the bytes of
the turn before. What was parsed of them is remembered, and of a body only the rest is parsed:

    {"model":"m","messages":[{...},{...},{...},{...},{...}],"tools":[...]}
    head                    )[piece     )[piece     )[rest

A piece ends in front of `,{"role":`. In JSON these bytes are never inside a string, where a quote
is escaped. That they are between two messages, and nowhere deeper, shows when the piece is parsed:
by itself it is some items of a list. That the list is the body's `messages` shows when head and
rest are: with a mark where the pieces were, `messages` begins with the mark. Where one of both does
not hold, the body is to be parsed whole.
"""

from __future__ import annotations

import secrets
from typing import Any, Final, NamedTuple

import orjson
from xxhash import xxh3_64_intdigest, xxh3_128_intdigest

from router.api.body import LARGE_BYTES, costs_ms
from router.api.digests import MAX_MESSAGES, digest_message
from router.base.bounded import BoundedBytes

MIN_BYTES: Final = 32 * 1024  # of a body; a smaller one is parsed in 40 us
_PIECE_BYTES: Final = 16 * 1024  # at least
_MAX_BYTES: Final = 128 << 20  # estimated: a hundred conversations of 80,000 tokens
_BYTES_PER_MS: Final = 300_000  # of memory, for what takes so long to parse
_SEED_MASK: Final = (1 << 64) - 1
# How a client writes the list's beginning, and the place between two of its items.
_STYLES: Final = ((b'"messages":[', b'},{"role":'), (b'"messages": [', b'}, {"role":'))
_COMMA: Final = ord(",")


class _Piece:
    """Some messages, of which all that comes before them is known, too.

    next_key, next_bytes: The piece that came behind it last; tried before searching.
    digests: Of the messages, once they were needed; see `router.api.digests`.
    """

    __slots__ = ("digests", "key", "messages", "next_bytes", "next_key", "size_bytes")

    def __init__(self, key: int, messages: list[Any], text: bytes) -> None:
        self.key = key
        self.messages = messages
        self.digests: list[int] | None = None
        self.next_key = 0
        self.next_bytes = 0
        num_objects = text.count(b"{") + text.count(b"[")
        self.size_bytes = 2 * len(text) + round(costs_ms(text) * _BYTES_PER_MS) + 64 * num_objects


class Known(NamedTuple):
    """How much of a body is known: its bytes [start, end) are messages."""

    start: int
    end: int
    num_new_bytes: int  # of the body, in front of these and behind them
    pieces: list[_Piece]
    key: int  # of all bytes up to `end`
    boundary: bytes


class Parsed(NamedTuple):
    """A body, and the digests of its leading messages, of those that are remembered."""

    view: dict[str, Any]
    digests: list[int]


class KnownMessages:
    """Messages, by the bytes of bodies up to them; the least recently used go first.

    What `parse` returns shares them with other bodies: they are not to be changed.
    """

    __slots__ = ("_mark", "_pieces")

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._pieces: BoundedBytes[int, _Piece] = BoundedBytes(max_bytes)
        self._mark = secrets.token_hex(16)  # no client can write it

    @property
    def size_bytes(self) -> int:
        """Estimate the memory held."""
        return self._pieces.size_bytes

    def find(self, body: bytes, owner: str = "") -> Known | None:
        """Find how much of a body is known; None: it is not of the kind that is remembered.

        `owner`: What others sent is not found, since the time that it takes could be measured.
        """
        if not MIN_BYTES <= len(body) <= LARGE_BYTES:
            return None
        style = next((each for each in _STYLES if each[0] in body), None)
        if style is None:
            return None
        opening, boundary = style
        start = position = body.index(opening) + len(opening)
        view = memoryview(body)
        key = xxh3_128_intdigest(view[:start], xxh3_64_intdigest(owner.encode()))
        pieces: list[_Piece] = []
        while (found := self._behind(pieces, key, body, view, position, boundary)) is not None:
            pieces.append(found[0])
            key, position = found[0].key, found[1]
        num_new_bytes = len(body) - (position - start)
        return Known(start, position, num_new_bytes, pieces, key, boundary)

    def _behind(
        self,
        pieces: list[_Piece],
        key: int,
        body: bytes,
        view: memoryview,
        start: int,
        boundary: bytes,
    ) -> tuple[_Piece, int] | None:
        """Find the piece that follows, and its end; None: it is not known."""
        seed = key & _SEED_MASK
        last = pieces[-1] if pieces else None
        if last is not None and last.next_bytes:
            end = start + last.next_bytes
            if xxh3_128_intdigest(view[start:end], seed) == last.next_key:
                piece = self._pieces.get(last.next_key)
                if piece is not None:
                    return piece, end
        end = _end_of_piece(body, start, boundary)
        piece = self._pieces.get(xxh3_128_intdigest(view[start:end], seed))
        if piece is None:
            return None
        if last is not None:
            last.next_key, last.next_bytes = piece.key, end - start
        return piece, end

    def parse(self, body: bytes, known: Known) -> Parsed | None:
        """Decode a body of which `find` just knew so much; None: it has to be decoded whole."""
        pieces, key, position = list(known.pieces), known.key, known.end
        try:
            while (end := _end_of_piece(body, position, known.boundary)) > position:
                text = body[position:end]
                key = xxh3_128_intdigest(text, key & _SEED_MASK)
                pieces.append(_Piece(key, _items(text, is_first=not pieces), text))
                position = end
            if not pieces:
                return None
            mark = b'"%b"' % self._mark.encode()
            decoded = orjson.loads(b"%b%b%b" % (body[: known.start], mark, body[position:]))
        except ValueError:
            return None
        view: dict[str, Any] = decoded if type(decoded) is dict else {}
        rest = view.get("messages")
        if type(rest) is not list or not rest or rest[0] != self._mark:
            return None
        messages: list[Any] = []
        for piece in pieces:
            messages += piece.messages
        view["messages"] = messages + rest[1:]
        self._touch(pieces)
        return Parsed(view, _digests_of(pieces) if len(messages) <= MAX_MESSAGES else [])

    def _touch(self, pieces: list[_Piece]) -> None:
        """Make pieces the most recently used, the first ones most of all; keep the budget."""
        known = self._pieces
        for piece in reversed(pieces):
            if piece.key in known:
                known.move_to_end(piece.key)
            else:
                known.put(piece.key, piece)


def _digests_of(pieces: list[_Piece]) -> list[int]:
    digests: list[int] = []
    for piece in pieces:
        if piece.digests is None:
            piece.digests = [digest_message(message) for message in piece.messages]
        digests += piece.digests
    return digests


def _items(text: bytes, *, is_first: bool) -> list[Any]:
    """Decode some items of a list, behind a comma where they are not the first.

    Raises:
        ValueError: it is something else.
    """
    if not is_first and text[0] != _COMMA:
        raise ValueError("no comma")
    # As deep as in the body, where depth is bounded.
    lists: list[list[Any]] = orjson.loads(b"[[%b]]" % text[not is_first :])
    (items,) = lists
    return items


def _end_of_piece(body: bytes, start: int, boundary: bytes) -> int:
    """Find where the piece that starts there ends; at `start`: no piece does."""
    return max(start, body.find(boundary, start + _PIECE_BYTES) + 1)
