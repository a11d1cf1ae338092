"""Prompts in marked text: special tokens by number, and texts that are encoded apart from them.

    MARK id,id,… TEXT text [TEXT text …]

No text holds a mark, once it is escaped. A prompt may be cut in front of each MARK.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

MARK: Final = "\0\1"
TEXT: Final = "\0\2"
_NUL: Final = "\0\3"


def escaped(text: str) -> str:
    """Make a text one in which no mark is found."""
    return text.replace("\0", _NUL)


def unescaped(text: str) -> str:
    """Undo `escaped`."""
    return text.replace(_NUL, "\0")


def split(marked: str) -> Iterator[tuple[list[int], list[str]]]:
    """Yield what stands behind each mark: special tokens, and texts."""
    for piece in marked.split(MARK)[1:]:
        ids, *texts = piece.split(TEXT)
        yield [int(each) for each in ids.split(",")], [unescaped(each) for each in texts]
