"""The kinds of notes that routers send each other, and who receives each.

The owner of a kind registers it. The notes of an entry are decoded in one step. If one is
malformed, or of a kind that is not registered here, it is left out, and the others count.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import suppress
from functools import reduce
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from router.base.decoding import UNDECODABLE, decoder
from router.base.messages import Note, Notes
from router.base.wire_types import Text

N = TypeVar("N", bound=Note)

Receive = Callable[[N, str, float], object]
"""Takes a note, the name of the router that sent it, and now."""


class _RawNotes(Struct, frozen=True, array_like=True):
    """`Notes`, not decoded yet."""

    router: Text
    notes: tuple[msgspec.Raw, ...]


_decode_entry = decoder(_RawNotes, "msgpack")


class NoteKinds:
    """The registry of kinds. `num_garbage` counts the notes and entries that were left out."""

    def __init__(self) -> None:
        self.num_garbage = 0
        self._receivers: dict[type[Note], Receive[Any]] = {}
        self._with_own: set[type[Note]] = set()
        self._decode: Callable[[msgspec.Raw], Note] = msgspec.msgpack.Decoder(Note).decode
        self._decode_all: Callable[[bytes], tuple[str, tuple[Note, ...]]] | None = None

    def register(self, kind: type[N], receive: Receive[N], *, with_own: bool = False) -> None:
        """Register the receiver of a kind of notes. Its tag tells it from the other kinds.

        `with_own`: our own, too, as they come back: their order among the others' counts.
        """
        self._receivers[kind] = receive
        if with_own:
            self._with_own.add(kind)
        kinds: Any = reduce(operator.or_, self._receivers)
        self._decode = msgspec.msgpack.Decoder(kinds).decode
        self._decode_all = msgspec.msgpack.Decoder(tuple[Text, tuple[kinds, ...]]).decode

    def decode(self, packed: bytes) -> Notes:
        """Decode what a router published.

        Raises:
            ValueError: it is none.
        """
        if self._decode_all is not None:
            with suppress(*UNDECODABLE):  # one of them is malformed, or of an unknown kind
                return Notes(*self._decode_all(packed))
        try:
            entry = _decode_entry(packed)
        except ValueError:
            self.num_garbage += 1
            raise
        notes = []
        for each in entry.notes:
            try:
                notes.append(self._decode(each))
            except UNDECODABLE:
                self.num_garbage += 1
        return Notes(entry.router, tuple(notes))

    def receive(self, note: Note, router: str, now_s: float, *, is_own: bool) -> None:
        """Pass a note to the receiver of its kind.

        Raises:
            ValueError: it is malformed.
        """
        receive = self._receivers.get(type(note))
        if receive is not None and (not is_own or type(note) in self._with_own):
            receive(note, router, now_s)
