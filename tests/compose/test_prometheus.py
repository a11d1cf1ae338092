"""Prometheus takes the files as they are, sees everything, and its rules fire when they should."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from loadtest.dev import address, docs
from tests.compose.stacks import ALERTS as RULES
from tests.compose.stacks import DOCKER, REQUIRED, ROOT

TESTS = DOCKER / "prometheus" / "alerts_test.yml"
ALERTS = [rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]


def promtool(*words: str | Path) -> str:
    """Run it, or skip; return what it says, and fail if it is not content."""
    found = shutil.which("promtool")
    if found is None:
        why = "needs promtool on the PATH (Debian's package prometheus)"
        if os.environ.get(REQUIRED):
            pytest.fail(why)
        pytest.skip(why)
    done = subprocess.run([found, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_promtool_accepts_the_configuration(tmp_path: Path) -> None:
    """With its rules, which the container has below /etc."""
    file = tmp_path / "prometheus.yml"
    text = (DOCKER / "prometheus" / "prometheus.yml").read_text()
    file.write_text(text.replace("/etc/prometheus/alerts.yml", str(RULES)))
    (tmp_path / "targets.yml").write_text("[]")

    said = promtool("check", "config", file)

    assert "SUCCESS" in said
    assert f"{len(ALERTS)} rules found" in said


def test_promtool_accepts_the_rules() -> None:
    """All of them."""
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", RULES)


@pytest.mark.timeout(300)
def test_every_rule_fires_and_does_not() -> None:
    """By the cases of alerts_test.yml."""
    assert "SUCCESS" in promtool("test", "rules", TESTS)


def test_no_rule_goes_untested() -> None:
    """Each has a case in which it fires, beside one moment at which nothing does."""
    cases = yaml.safe_load(TESTS.read_text())["tests"]
    firing = set()
    for case in cases:
        checks = case["promql_expr_test"]
        expected = [sample["labels"] for check in checks for sample in check.get("exp_samples", ())]
        names = {re.findall(r'alertname="(\w+)"', labels)[0] for labels in expected}
        firing |= names
        assert len(names) <= 1, case["name"]
        assert len(checks) >= 2, case["name"]

    assert firing == {rule["alert"] for rule in ALERTS}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_rules_say_what_to_do(rule: dict[str, Any]) -> None:
    """What is wrong, what to do, where to read on: a heading that is there."""
    notes = rule["annotations"]

    assert rule["labels"]["severity"] in ("critical", "warning")
    assert notes["summary"].endswith(".")
    assert notes["description"].endswith(".")
    page, _, anchor = notes["runbook_url"].partition("#")
    assert anchor == rule["alert"].lower()
    file = page.removeprefix(f"{address.repository()}/blob/main/")
    assert f"### {rule['alert']}\n" in (ROOT / file).read_text()


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_rules_ask_for_metrics_that_exist(rule: dict[str, Any]) -> None:
    """Ours by the code, with their labels."""
    exported = set(re.findall(r"`(warmroute_\w+)`", docs.metric_tables()))

    for name in re.findall(r"\b(warmroute_\w+)", rule["expr"]):
        assert exported & {name, re.sub(r"_(bucket|sum|count)$", "", name)}, name
