"""How tests are kept apart: what several tests use is in modules that are not tests."""

from __future__ import annotations

import re
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
