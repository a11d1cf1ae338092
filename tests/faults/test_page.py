"""docs/operate/failures.md: what it names is there, and every fault that is tested is on it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from router.metrics import Metrics, PoolState, RankState, SharingState

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/operate/failures.md").read_text(encoding="utf-8")
SOURCE = "\n".join(file.read_text(encoding="utf-8") for file in (ROOT / "router").rglob("*.py"))
DEFINED = re.compile(r"^ *(?:async )?def (test_\w+)\(", re.MULTILINE)
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith(("| fault", "|---"))
]


def defined_in(path: str) -> Iterator[str]:
    for file in sorted((ROOT / "tests").glob(path)):
        yield from DEFINED.findall(file.read_text(encoding="utf-8"))


def named(cell: str) -> list[str]:
    return [name for names in re.findall(r"<!-- (.*?) -->", cell) for name in names.split()]


def test_every_row_names_tests_that_exist() -> None:
    """Four cells; in a comment of the last at least one test, none of them made up."""
    known = set(defined_in("**/test_*.py"))

    assert len(ROWS) > 40
    for row in ROWS:
        assert len(row) == 4, row
        assert named(row[3]), row[0]
        assert set(named(row[3])) <= known, row[0]


def test_every_fault_test_is_on_the_page() -> None:
    """Operators see what breaks a replica, a stream, a token or a request."""
    on_page = set(named(PAGE))
    helpers = {  # of the tests themselves, or of what is no fault
        "test_a_view_of_a_request_holds_what_it_was_given",
        "test_long_prompts_are_encoded_off_the_loop",
    }
    for file in ("replicas", "retries", "continuation", "events", "tokens", "clients"):
        assert set(defined_in(f"faults/test_{file}.py")) - on_page <= helpers, file


def test_every_metric_on_the_page_exists() -> None:
    """With its labels."""

    class NoReplicas:
        def pool_states(self) -> list[PoolState]:
            return [
                PoolState(
                    is_up=True,
                    num_blocks={},
                    counts={},
                    listing_age_s=None,
                    allocated_bytes=None,
                    capacity_bytes=None,
                    bytes_per_token={},
                    fetch_bytes_per_s={},
                )
            ]

        def rank_states(self) -> list[RankState]:
            return []

    metrics = Metrics()
    without_redis = SharingState(is_up=False, num_routers=1, num_streams={}, counts={})
    metrics.watch(NoReplicas())
    metrics.watch_sharing(lambda: without_redis)
    metrics.watch_sources(list)
    families = {family.name for family in metrics.registry.collect()}
    found = re.findall(r'`(warmroute_\w+)(?:\{\w+="(\w+)"\})?`', PAGE)

    assert found
    for name, value in found:
        assert name.removesuffix("_total") in families, name
        spelled = (f'"{value}"', f"num_{value}", f"{value.upper()} = auto()")
        assert not value or any(text in SOURCE for text in spelled), value


def test_every_log_line_on_the_page_exists() -> None:
    """Quoted as the source has it."""
    cells = [re.sub(r"`[^`]*`", "", row[3]) for row in ROWS]
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
