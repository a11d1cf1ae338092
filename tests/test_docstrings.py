"""Docstrings begin with what happens, or with what it is that they describe."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT = Path(__file__).parent.parent
VAGUE: Final = frozenset(
    {"Give", "Have", "Hear", "Know", "Let", "Look", "Mind", "Note", "Say", "Take", "Tell"}
)
FRAGMENTS: Final = frozenset({"By", "For", "In", "None", "Of"})


def beginnings(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the first word of each docstring, those of constants included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value
            if isinstance(text, str) and text.strip():
                yield node.lineno, text.split()[0].rstrip(".,:;")


@pytest.mark.parametrize("package", ["router", "policies", "loadtest"])
def test_docstrings_begin_with_what_happens(package: str) -> None:
    """A vague verb could stand for "return", "record" or "stop"."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {word}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, word in beginnings(path.read_text(encoding="utf-8"))
        if word in VAGUE | FRAGMENTS
    ]

    assert wrong == []


@pytest.mark.parametrize(
    "source",
    [
        'def f():\n    """Note a request."""',
        'class C:\n    async def f(self):\n        """Note, and more."""',
        'class C:\n    """Note: a class."""',
        'X = 1\n"""Note of a constant."""',
        '"""Note on a module."""',
    ],
)
def test_the_first_word_of_each_kind_of_docstring_is_seen(source: str) -> None:
    assert [word for _, word in beginnings(source)] == ["Note"]
