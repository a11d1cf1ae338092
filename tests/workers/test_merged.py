"""How the answers of several workers become one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from router.http.merged_metrics import merged_metrics
from router.metrics import Metrics
from router.observers.live.merged import MergedFeed, merged_state
from router.observers.sessions.admin import merged_findings
from tests.cli.states import REPLICA, state

State = dict[str, Any]


def test_every_sample_has_its_worker_and_every_family_is_there_once() -> None:
    pages = {}
    for number in (1, 3):
        metrics = Metrics()
        metrics.requests.labels("chat", 'r{1} "a', "ok").inc(number)
        metrics.loop_lag.observe(0.01)
        pages[number] = metrics.render()
    families = list(text_string_to_metric_families(merged_metrics(pages, 3).decode()))

    names = [family.name for family in families]
    assert len(names) == len(set(names))
    samples = [sample for family in families for sample in family.samples]
    assert {sample.labels["worker"] for sample in samples} == {"1", "2", "3"}
    up = {s.labels["worker"]: s.value for s in samples if s.name == "warmroute_worker_up"}
    assert up == {"1": 1.0, "2": 0.0, "3": 1.0}
    counted = {s.labels["worker"]: s.value for s in samples if s.name == "warmroute_requests_total"}
    assert counted == {"1": 1.0, "3": 3.0}
    replicas = {s.labels["replica"] for s in samples if s.name == "warmroute_requests_total"}
    assert replicas == {'r{1} "a'}


def own_state(*replicas: State, **sections: Any) -> State:
    """Return a state of one worker."""
    made = state(*replicas, tenants=None, degraded=[], tokenizers=[], sources=[]) | sections
    made["router"] |= {"listeners": 1, "unresolved": []}
    made["replicas"] |= {"predictions": {"exact": 1.0}, "unserved": []}
    made["queue"] = {"batch": 0} | made["queue"]
    made["tokens"] = {"totals": [1, 2, 3, 4]} | made["tokens"]
    return made


def test_what_each_worker_counts_is_added_up() -> None:
    """Of the rest, the worker that has run for longest is shown."""
    waiting = {"on": True, "waiting": 2, "batch": 1, "for": {"room": 2}}
    tenants = {"total": 4, "shown": [{"name": "a", "requests": 2.0, "uncached": 5.0}]}
    first = own_state(
        REPLICA | {"requests": 7},
        queue=waiting | {"shown": [{"waited_s": 1.0}]},
        tenants=tenants,
        tokens={"columns": ["cached"], "step_s": 10.0, "totals": [5], "steps": [[100, 5]]},
    )
    second = own_state(
        REPLICA | {"requests": 8},
        queue=waiting | {"shown": [{"waited_s": 9.0}]},
        tenants=tenants | {"shown": [*tenants["shown"], {"name": "b", "requests": 1.0}]},
        tokens={
            "columns": ["cached"],
            "step_s": 10.0,
            "totals": [7],
            "steps": [[95, 1], [104, 6]],
        },
    )
    merged = merged_state({2: first, 1: second}, 2)

    assert merged["replicas"]["shown"] == [REPLICA | {"requests": 7, "right": 18, "audited": 20}]
    assert merged["replicas"]["predictions"] == {"exact": 2.0}
    queue = merged["queue"]
    assert (queue["waiting"], queue["batch"], queue["for"]) == (4, 2, {"room": 4})
    assert [row["waited_s"] for row in queue["shown"]] == [9.0, 1.0]
    assert merged["tokens"]["totals"] == [12]
    assert merged["tokens"]["steps"] == [[95, 1], [104, 11]]
    assert merged["tenants"]["shown"] == [
        {"name": "a", "requests": 4.0, "uncached": 10.0},
        {"name": "b", "requests": 1.0},
    ]
    assert merged["workers"] == {"total": 2, "missing": [], "degraded": []}


def test_what_is_wrong_at_one_worker_is_said_with_its_number() -> None:
    everywhere = "replica r2 is down: refused"
    first = own_state(REPLICA | {"publishes": True}, degraded=[everywhere])
    second = own_state(REPLICA, degraded=[everywhere, "host name a does not resolve"])
    merged = merged_state({1: first, 3: second}, 3)

    assert merged["workers"]["missing"] == [2]
    assert merged["degraded"] == [
        "worker 2 does not answer; the log of its parent says why",
        "worker 3: host name a does not resolve",
    ]


def test_of_findings_of_a_kind_the_largest_is_kept() -> None:
    small, large = ({"tenant": None, "part": "system", "num_again": n} for n in (5, 9))
    other = {"tenant": "a", "part": "system", "num_again": 1}

    assert merged_findings([[small], [other, large]]) == [large, other]


@pytest.mark.parametrize("is_gone", [False, True])
async def test_requests_that_workers_leave_out_are_added_up(is_gone: bool) -> None:
    """Those of a worker that is gone stay counted."""
    feed = MergedFeed(2)
    await feed.take(1, b'{"kind":"lost","decisions":3}\n')
    await feed.take(2, b'{"kind":"decision","request":"a"}\n')
    await feed.take(2, b'{"kind":"lost","decisions":4}\n')
    await feed.take(2, b'{"kind":"sta')
    if is_gone:
        feed.ended(1)
    lines = [msgspec.json.decode(line) for line in feed.lines(0.0, [1, 2])]

    assert lines == [{"kind": "decision", "request": "a"}, {"kind": "lost", "decisions": 7}]
    assert feed.lines(1.0, [2]) == []
