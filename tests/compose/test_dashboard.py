"""The dashboard: up to date, well formed, and every query of it returns data.

Grafana is in none of the package registries. So its JSON is decoded by Grafana's own types (the
Foundation SDK, where it is installed), held against the few rules that those do not know, and its
queries are run against a real Prometheus that scrapes the emulated stack (tests/containers).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import combinations
from typing import Any

import pytest
import yaml

from loadtest.dev import docs
from tests.compose.queries import DASHBOARD, dashboard, queries
from tests.compose.stacks import DOCKER, REQUIRED

PANELS = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]

# Units of Grafana that are used. Source: packages/grafana-data/src/valueFormats/categories.ts
UNITS = {"short", "none", "s", "percentunit", "reqps", "ops", "bytes", "Bps", "tokens/s"}


def test_it_is_what_its_source_makes() -> None:
    """`make docs` would change nothing."""
    script = DOCKER / "grafana" / "dashboard.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, check=False)

    assert done.returncode == 0, done.stdout.decode()


def test_grafanas_own_types_know_all_of_it() -> None:
    """Decoded and encoded again, nothing is lost: no field that Grafana does not have."""
    try:
        from grafana_foundation_sdk.cog.encoder import JSONEncoder
        from grafana_foundation_sdk.cog.plugins import register_default_plugins
        from grafana_foundation_sdk.models.dashboard import Dashboard
    except ImportError:
        if os.environ.get(REQUIRED):
            raise
        pytest.skip("needs grafana-foundation-sdk")
    register_default_plugins()

    again = json.loads(json.dumps(Dashboard.from_json(dashboard()), cls=JSONEncoder))

    assert _lost(dashboard(), again, "") == []


def _lost(given: Any, again: Any, where: str) -> list[str]:
    if isinstance(given, dict):
        if not isinstance(again, dict):
            return [where]
        return [
            lost
            for key, value in given.items()
            for lost in (
                _lost(value, again[key], f"{where}.{key}") if key in again else [f"{where}.{key}"]
            )
        ]
    if isinstance(given, list):
        if not isinstance(again, list) or len(given) != len(again):
            return [where]
        return [
            lost
            for i, (one, other) in enumerate(zip(given, again, strict=True))
            for lost in _lost(one, other, f"{where}[{i}]")
        ]
    return [] if given == again else [where]


def test_panels_do_not_overlap() -> None:
    """Each has its place in the grid of 24 columns, and an id of its own."""
    places = [panel["gridPos"] for panel in dashboard()["panels"]]
    ids = [panel["id"] for panel in dashboard()["panels"]]

    assert len(set(ids)) == len(ids)
    for place in places:
        assert place["x"] >= 0
        assert place["x"] + place["w"] <= 24
    for one, other in combinations(places, 2):
        beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert beside or above, (one, other)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_panels_say_what_they_show(panel: dict[str, Any]) -> None:
    """A sentence, a unit, a legend, the data source that is chosen; colours for every state."""
    source = {"type": "prometheus", "uid": "${datasource}"}

    assert re.search(r"\.$", panel["description"])
    assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
    assert panel["datasource"] == source
    for target in panel["targets"]:
        assert target["legendFormat"]
        assert target["datasource"] == source
    if panel["type"] == "state-timeline":
        assert panel["fieldConfig"]["defaults"]["mappings"]


def test_any_prometheus_can_be_chosen() -> None:
    """The first variable lists them; the other one asks the one that is chosen."""
    sources, *others = dashboard()["templating"]["list"]

    assert (sources["type"], sources["query"]) == ("datasource", "prometheus")
    assert [each["datasource"]["uid"] for each in others] == [f"${{{sources['name']}}}"]
    assert '"uid": "prometheus"' not in DASHBOARD.read_text()


def test_it_is_provisioned_from_where_it_is_mounted() -> None:
    """The provider's path, the home dashboard and the mount agree."""
    provider = yaml.safe_load(
        (DOCKER / "grafana/provisioning/dashboards/warmroute.yaml").read_text()
    )["providers"][0]
    grafana = yaml.safe_load((DOCKER / "compose.yaml").read_text())["services"]["grafana"]
    path = provider["options"]["path"]

    assert f"./grafana/dashboards:{path}:ro" in grafana["volumes"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{path}/{DASHBOARD.name}"
    assert "./grafana/provisioning:/etc/grafana/provisioning:ro" in grafana["volumes"]


def test_queries_ask_for_metrics_that_exist() -> None:
    """Ours by the code; and they keep to the chosen routers."""
    exported = set(re.findall(r"`(warmroute_\w+)`", docs.metric_tables()))

    for query in queries():
        for name, selector in re.findall(r"\b(warmroute_\w+)\{([^}]*)\}", query.expr):
            assert exported & {name, re.sub(r"_(bucket|sum|count)$", "", name)}, name
            assert 'instance=~"$router"' in selector, query.expr
        assert len(re.findall(r"\bwarmroute_\w+", query.expr)) == query.expr.count("$router")
