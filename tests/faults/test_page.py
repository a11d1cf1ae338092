"""The pages of failures: what they name is there, and every fault that is tested is on them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

from router.metrics import Metrics
from router.metrics.families import FAMILIES
from router.observers.early.early_results import EarlyMetrics
from router.observers.experiments.metrics import ExperimentMetrics

ROOT = Path(__file__).resolve().parents[2]
PAGE = "\n".join(
    (ROOT / "docs/operate" / name).read_text(encoding="utf-8")
    for name in ("failures.md", "lost-knowledge.md")
)
PROMISES = (ROOT / "docs/contribute/promises.md").read_text(encoding="utf-8")
SOURCE = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "router").rglob("*.py"))
DEFINED = re.compile(r"^ *(?:async )?def (test_\w+)\(", re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\([^)]*\)")
# Section of the page -> first cell of a row -> the tests behind it
TESTS: dict[str, dict[str, list[str]]] = tomllib.loads(
    (ROOT / "tests/faults/faults.toml").read_text(encoding="utf-8")
)
NAMED = {name for rows in TESTS.values() for names in rows.values() for name in names}


def rows() -> dict[str, list[list[str]]]:
    """Return the cells of each row of each section of the page; not heads, nor tables of a key."""
    found: dict[str, list[list[str]]] = {}
    section, is_body, head, before = "", False, "", ""
    for line in PAGE.splitlines():
        if line.startswith("#"):
            section = line.lstrip("# ")
        if line.startswith("|") and is_body and "forward." not in head:
            found.setdefault(section, []).append([cell.strip() for cell in line.split("|")[1:-1]])
        if line.startswith("|---"):
            head = before
        is_body = line.startswith("|---") or (is_body and line.startswith("|"))
        before = line
    return found


ROWS = rows()


def defined_in(path: str) -> Iterator[str]:
    for file in sorted((ROOT / "tests").glob(path)):
        yield from DEFINED.findall(file.read_text(encoding="utf-8"))


def test_every_row_has_tests_that_exist() -> None:
    """Each row is in faults.toml, in its section, with at least one test; none is made up."""
    known = set(defined_in("**/test_*.py"))
    on_page = {part: [LINK.sub(r"\1", row[0]) for row in ROWS[part]] for part in ROWS}

    assert sum(map(len, ROWS.values())) > 40
    assert on_page == {section: list(tests) for section, tests in TESTS.items()}
    assert all(names for tests in TESTS.values() for names in tests.values())
    assert NAMED <= known
    for row in (row for part in ROWS.values() for row in part):
        assert all(row), row


def test_every_fault_test_is_behind_a_row() -> None:
    """Operators see what breaks a replica, a stream, a token or a request."""
    helpers = {  # of the tests themselves, or of what is no fault
        "test_long_prompts_are_encoded_off_the_loop",
    }
    for file in ("replicas", "retries", "events", "tokens", "clients"):
        assert set(defined_in(f"faults/test_{file}.py")) - NAMED <= helpers, file


def test_every_metric_on_the_page_exists() -> None:
    """With its labels."""

    metrics = Metrics()
    for table in (EarlyMetrics, ExperimentMetrics):
        table(metrics.registry)
    families = {family.name for family in metrics.registry.collect()}
    families |= {family.name.removesuffix("_total") for family in FAMILIES}
    found = re.findall(r'`(warmroute_\w+)(?:\{\w+="(\w+)"\})?`', PAGE)

    assert found
    for name, value in found:
        assert name.removesuffix("_total") in families, name
        spelled = (f'"{value}"', f"num_{value}", f"{value.upper()} = auto()")
        assert not value or any(text in SOURCE for text in spelled), value


def test_every_log_line_on_the_page_exists() -> None:
    """Quoted as the source has it."""
    cells = [re.sub(r"`[^`]*`", "", row[-1]) for part in ROWS.values() for row in part]
    quoted = {text for cell in cells for text in re.findall(r'"([^"]+)"', cell)}

    assert quoted
    for text in quoted:
        assert f'"{text}' in SOURCE, text


def test_every_setting_on_the_page_exists() -> None:
    """As a key of the configuration."""
    from router import config

    keys = {".".join(option.path) for option in config.options()}
    for key in re.findall(r"`((?:forward|limits|health|tokens|events)\.\w+)`", PAGE):
        assert key in keys, key


def test_every_promise_names_tests_that_exist() -> None:
    """A function, a file, or a benchmark; none of them made up."""
    rows = [line for line in PROMISES.splitlines() if re.match(r"\| [A-Z]", line)]
    known = set(defined_in("**/test_*.py"))

    assert len(rows) > 25
    for row in rows:
        named = re.findall(r"`([^`]+)`", row.split("|")[2])
        assert named, row
        for name in named:
            is_file = name.startswith("tests/") and (ROOT / name).is_file()
            module, _, bench = name.partition("loadtest.dev.bench ")
            is_bench = not module and (ROOT / f"loadtest/dev/bench/bench_{bench}.py").is_file()
            assert is_file or is_bench or name in known, name
