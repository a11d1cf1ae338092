"""docs/operate/security.md: every promise names a test, and the tests are there."""

from __future__ import annotations

import re

from tests.faults.test_page import ROOT, defined_in

PAGE = (ROOT / "docs/operate/security.md").read_text(encoding="utf-8")


def test_every_promise_names_tests_that_exist() -> None:
    """A function, a file, or a benchmark; none of them made up."""
    promises = PAGE.partition("## Promises")[2].partition("### Supply chain")[0]
    rows = [line for line in promises.splitlines() if re.match(r"\| [A-Z]", line)]
    known = set(defined_in("**/test_*.py"))

    assert len(rows) > 25
    for row in rows:
        named = re.findall(r"`([^`]+)`", row.split("|")[2])
        assert named, row
        for name in named:
            is_file = name.startswith("tests/") and (ROOT / name).is_file()
            assert is_file or name in known or name == "loadtest.bench stall", name
