"""Write prompts in marked text: special tokens by number, and texts that are encoded one by one.

    MARK id,id,… TEXT text [TEXT text …]

An escaped text contains no mark. A prompt may be cut in front of each MARK. gpt-oss prompts have a
header's key in the place of the ids (`models.harmony`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

MARK: Final = "\0\1"
TEXT: Final = "\0\2"
_NUL: Final = "\0\3"


def escaped(text: str) -> str:
    """Escape a text so that it contains no mark."""
    return text.replace("\0", _NUL)


def unescaped(text: str) -> str:
    """Undo `escaped`."""
    return text.replace(_NUL, "\0")


def split(marked: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the head behind each mark, and the texts behind the head; both unescaped."""
    for piece in marked.split(MARK)[1:]:
        head, *texts = piece.split(TEXT)
        yield unescaped(head), [unescaped(each) for each in texts]
