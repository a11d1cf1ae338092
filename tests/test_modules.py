"""Modules: what several tests use is in no test, and a class name is used once."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent
IMPORT = re.compile(r"^(?:from|import) tests\.(?:\w+\.)*test_\w+", re.M)


def test_no_test_imports_another_test_module() -> None:
    """Shared helpers are in conftest.py, or in a module whose name does not begin with test_."""
    wrong = [
        str(path.relative_to(ROOT))
        for path in ROOT.rglob("*.py")
        if IMPORT.search(path.read_text(encoding="utf-8"))
    ]

    assert wrong == []


def test_a_class_name_is_used_once() -> None:
    """A class is called so nowhere else in router/ and policies/."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in [*ROOT.parent.glob("router/**/*.py"), *ROOT.parent.glob("policies/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT.parent)}:{node.lineno}")

    assert "Observer" in places
    assert {name: where for name, where in places.items() if len(where) > 1} == {}
