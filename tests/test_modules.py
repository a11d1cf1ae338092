"""Modules: tests import no other test, a class name is used once, no files form a circle."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Mapping
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


def test_no_circle_of_files() -> None:
    """No files of router/ and policies/ import each other, not even for types."""
    trees = {}
    for path in [*ROOT.parent.glob("router/**/*.py"), *ROOT.parent.glob("policies/**/*.py")]:
        name = ".".join(path.relative_to(ROOT.parent).with_suffix("").parts)
        trees[name.removesuffix(".__init__")] = ast.parse(path.read_bytes())
    imports: dict[str, set[str]] = defaultdict(set)
    for module, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                both = [(f"{node.module}.{each.name}", node.module) for each in node.names]
                imports[module] |= {one if one in trees else other for one, other in both}

    assert "router.request.results" in imports["router.request.story"]
    circle = [module for module in trees if module in _behind(module, imports)]
    assert ", ".join(circle) == ""


def _behind(module: str, imports: Mapping[str, set[str]]) -> set[str]:
    """Return the modules that one imports, and what those import."""
    found: set[str] = set()
    ahead = [module]
    while ahead:
        new = imports.get(ahead.pop(), set()) - found
        found |= new
        ahead += new
    return found
