"""The source of dashboards/warmroute.json: which panel asks what, top to bottom.

    python docker/grafana/dashboard.py            write the file
    python docker/grafana/dashboard.py --check    status 1 if it is old

A panel is a question in one sentence (its description) and the queries that answer it. Every query
is run against a real Prometheus in tests/containers, and must return data there.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

FILE = Path(__file__).parent / "dashboards" / "warmroute.json"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}  # what is chosen at the top
WIDTH = 24  # Grafana's grid

Kind = Literal["timeseries", "stat", "state-timeline", "table"]

R = "[$__rate_interval]"
ROUTER = 'job="warmroute",instance=~"$router"'
OR_NONE = " or on() vector(0)"  # one line at 0 while there is no other
AGAIN = "changed|evicted|moved|cleared|pool_lost|fetch_failed|salt_or_model"  # causes
GREEN, YELLOW, RED = "green", "#EAB839", "red"


@dataclass(frozen=True)
class Query:
    """One query; `legend` may name labels, {{replica}}."""

    expr: str
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    """One panel. `steps`: thresholds (value from which a colour holds), the first from below."""

    title: str
    text: str
    queries: Sequence[Query]
    unit: str = "short"
    kind: Kind = "timeseries"
    stacked: bool = False
    width: int = 8
    height: int = 7
    steps: Sequence[tuple[float | None, str]] = ((None, GREEN),)
    mappings: dict[str, tuple[str, str]] = field(default_factory=dict)  # value -> text, colour
    maximum: float | None = None
    signed: bool = False  # may be below 0


@dataclass(frozen=True)
class Row:
    title: str
    panels: Sequence[Panel]


def rate(metric: str, by: str, **labels: str) -> str:
    """Sum a counter's rate over routers."""
    wanted = "".join(f',{name}=~"{value}"' for name, value in labels.items())
    return f"sum by ({by}) (rate(warmroute_{metric}{{{ROUTER}{wanted}}}{R}))"


def quantile(q: float, metric: str, by: str = "", **labels: str) -> str:
    groups = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{metric}_bucket', groups, **labels)})"


def gauge(metric: str, by: str, how: str = "max", **labels: str) -> str:
    """A gauge of one thing that every router reports, so not summed."""
    wanted = "".join(f',{name}=~"{value}"' for name, value in labels.items())
    return f"{how} by ({by}) (warmroute_{metric}{{{ROUTER}{wanted}}})"


def tokens(kind: str) -> str:
    return f'sum(rate(warmroute_tokens_total{{{ROUTER},kind="{kind}"}}{R}))'


def share(part: str, whole: str) -> str:
    return f"{part} / ({whole} > 0){OR_NONE}"


ROWS = [
    Row(
        "How is it going?",
        [
            Panel(
                "Requests", "Requests that were answered, by all routers.",
                [Query(f"sum(rate(warmroute_requests_total{{{ROUTER}}}{R}))")],
                "reqps", "stat", width=3, height=4,
            ),
            Panel(
                "TTFT, median", "Half of all requests got their first byte within this time after they arrived at the router.",
                [Query(quantile(0.5, "ttft_seconds"))], "s", "stat", width=3, height=4,
            ),
            Panel(
                "TTFT, P99", "1 % of requests waited longer than this for their first byte.",
                [Query(quantile(0.99, "ttft_seconds"))], "s", "stat", width=3, height=4,
                steps=((None, GREEN), (10, YELLOW), (30, RED)),
            ),
            Panel(
                "Tokens from a cache", "Share of prompt tokens that engines reported as cached.",
                [Query(share(tokens("reported_cached"), tokens("prompt")))],
                "percentunit", "stat", width=3, height=4, maximum=1,
                steps=((None, RED), (0.3, YELLOW), (0.6, GREEN)),
            ),
            Panel(
                "Right predictions", "Share of audited predictions of cached tokens that were right when they were made.",
                [Query(share(rate("audited_total", "", result="exact|evicted"), rate("audited_total", "")))],
                "percentunit", "stat", width=3, height=4, maximum=1,
                steps=((None, RED), (0.9, YELLOW), (0.98, GREEN)),
            ),
            Panel(
                "Failed", "Share of requests that failed without a mistake of the client.",
                [Query(share(f'sum(rate(warmroute_requests_total{{{ROUTER},outcome=~"replica_failed|replica_unreachable"}}{R}))', f"sum(rate(warmroute_requests_total{{{ROUTER}}}{R}))"))],
                "percentunit", "stat", width=3, height=4,
                steps=((None, GREEN), (0.001, YELLOW), (0.01, RED)),
            ),
            Panel(
                "Replicas in use", "Candidates (data-parallel ranks) that requests may be sent to.",
                [Query(f"sum({gauge('replica_healthy', 'replica', 'min')})")], "none", "stat", width=3, height=4,
                steps=((None, RED), (1, GREEN)),
            ),
            Panel(
                "Routers ready", "Routers that the front may send requests to.",
                [Query('sum(haproxy_backend_active_servers{job="front",proxy="routers"})')],
                "none", "stat", width=3, height=4, steps=((None, RED), (1, YELLOW), (2, GREEN)),
            ),
        ],
    ),
    Row(
        "Requests and time to first token",
        [
            Panel(
                "Requests by outcome", "How requests ended. client_gone: the client left; replica_failed: an answer broke off; replica_unreachable: no replica could be reached.",
                [Query(rate("requests_total", "outcome"), "{{outcome}}")], "reqps", stacked=True,
            ),
            Panel(
                "Time to first token", "From arrival at the router to the first byte of the answer, over all replicas.",
                [Query(quantile(q, "ttft_seconds"), f"P{int(q * 100)}") for q in (0.5, 0.9, 0.99)], "s",
            ),
            Panel(
                "Refused and moved on", "Refused: the router answered with an error, by code. Moved on: a try failed before the first byte and another replica answered, which clients do not see.",
                [
                    Query(rate("refused_total", "code") + OR_NONE, "refused {{code}}"),
                    Query(rate("failovers_total", "replica, reason") + OR_NONE, "moved on from {{replica}}: {{reason}}"),
                ], "reqps",
            ),
        ],
    ),
    Row(
        "Where prompt tokens came from",
        [
            Panel(
                "Tokens by origin", "As predicted when the replica was chosen: from its GPU cache, from its offload in main memory, from the shared pool, or computed again.",
                [
                    Query(f"clamp_min({tokens('predicted_cached')} - {tokens('predicted_cpu')} - {tokens('predicted_pool')}, 0)", "gpu"),
                    Query(tokens("predicted_cpu"), "cpu"),
                    Query(tokens("predicted_pool"), "pool"),
                    Query(f"clamp_min({tokens('prompt')} - {tokens('predicted_cached')}, 0)", "recomputed"),
                ], "tokens/s", stacked=True,
            ),
            Panel(
                "Share from a cache, by replica", "Share of the prompt tokens that the engine of each replica reported as cached.",
                [Query(f'{rate("tokens_total", "replica", kind="reported_cached")} / ({rate("tokens_total", "replica", kind="prompt")} > 0)', "{{replica}}")],
                "percentunit", maximum=1,
            ),
            Panel(
                "Predictions against usage", "over: fewer tokens were cached than predicted. under: more were. evicted: right when made, but blocks were evicted before the engine reached the request.",
                [Query(rate("audited_total", "result"), "{{result}}")], "reqps", stacked=True,
            ),
        ],
    ),
    Row(
        "Why prompt tokens were computed",
        [
            Panel(
                "Computed tokens by cause", "Prompt tokens of sessions that engines computed. new: their session did not have them before. last_block: engines share whole blocks only.",
                [Query(f'sum by (cause) (rate(warmroute_prompt_tokens_total{{{ROUTER},cause!="cached"}}{R}))', "{{cause}}")], "tokens/s", stacked=True,
            ),
            Panel(
                "Computed again, of all prompt tokens", "Tokens that the session had before, by causes that can be avoided. The alert TokensRecomputed fires above 20 %, CausesUnknown if 2 % are unknown.",
                [
                    Query(share(f'sum(rate(warmroute_prompt_tokens_total{{{ROUTER},cause=~"{AGAIN}"}}{R}))', f"sum(rate(warmroute_prompt_tokens_total{{{ROUTER}}}{R}))"), "computed again"),
                    Query(share(f'sum(rate(warmroute_prompt_tokens_total{{{ROUTER},cause="unknown"}}{R}))', f"sum(rate(warmroute_prompt_tokens_total{{{ROUTER}}}{R}))"), "unknown"),
                ], "percentunit", maximum=1,
            ),
            Panel(
                "Causes", "Tokens of the whole time shown, by cause; cached: not computed. docs/operate/recomputed.md says what to do about each.",
                [Query(f"sort_desc(sum by (cause) (increase(warmroute_prompt_tokens_total{{{ROUTER}}}[$__range])))")], kind="table",
            ),
            Panel(
                "GPU time of sessions", "GPU seconds a second: of prompts, of answers, and what caches saved. A fully used replica has 1.",
                [Query(rate("gpu_seconds_total", "kind"), "{{kind}}")], "none",
            ),
            Panel(
                "Cost of sessions", "What turns cost in an hour, and what caches saved, in the currency of cost_per_hour. 0 without a price.",
                [Query(f"3600 * {rate('cost_total', 'kind')}{OR_NONE}", "{{kind}}")], "none",
            ),
        ],
    ),
    Row(
        "Replicas",
        [
            Panel("Requests by replica", "By the replica that answered.", [Query(rate("requests_total", "replica"), "{{replica}}")], "reqps", stacked=True),
            Panel(
                "Requests in flight", "Requests of all routers together.",
                [Query(gauge("inflight_requests", "replica"), "{{replica}}")], "none",
            ),
            Panel(
                "Queue ahead", "Predicted time until the prefills in flight are done, which a new request would wait.",
                [Query(gauge("queue_seconds", "replica"), "{{replica}}")], "s",
            ),
            Panel(
                "Uncached tokens in flight", "Prompt tokens that replicas still have to compute.",
                [Query(gauge("inflight_uncached_tokens", "replica"), "{{replica}}")], "short",
            ),
            Panel("TTFT by replica, P90", "From arrival at the router to the first byte.", [Query(quantile(0.9, "ttft_seconds", "replica"), "{{replica}}")], "s"),
            Panel(
                "Error of the cost model", "Mean absolute difference of predicted and observed time to first token. If it is far above TTFT, decisions are guesses.",
                [Query(gauge("cost_model_error_seconds", "replica"), "{{replica}}")], "s",
            ),
            Panel("Waiting in the router", "Prompts in the router's queue.", [Query(f"warmroute_waiting_requests{{{ROUTER}}}", "{{instance}}")], "none", width=6, height=5),
            Panel("Waits, P90", "How long prompts waited in the router, by class.", [Query(quantile(0.9, "class_wait_seconds", "class") + OR_NONE, "{{class}}")], "s", width=6, height=5),
            Panel(
                "Out of the queue", "Why prompts left the queue: their conversation has room (room), the engine had nothing to compute (idle), or queue.max_wait_s was over (waited_out). Refused: why they were refused.",
                [
                    Query(rate("released_total", "why") + OR_NONE, "{{why}}"),
                    Query(rate("queue_refused_total", "class, reason") + OR_NONE, "refused {{class}}: {{reason}}"),
                ], "reqps", width=6, height=5,
            ),
            Panel("Live conversations, of the cache", "Size of the live conversations, as a share of each cache. Above 1 they evict each other.", [Query(gauge("footprint_ratio", "replica"), "{{replica}}")], "percentunit", width=6, height=5),
            Panel(
                "In use", "0: at least one router sees it down, tripped or draining.",
                [Query(gauge("replica_healthy", "replica", "min"), "{{replica}}")], kind="state-timeline", width=12, height=5,
                mappings={"0": ("out", RED), "1": ("in use", GREEN)},
            ),
            Panel(
                "Engines: running and waiting", "As the engines report it.",
                [
                    Query('sum by (instance) (vllm:num_requests_running{job="engine"})', "running {{instance}}"),
                    Query('sum by (instance) (vllm:num_requests_waiting{job="engine"})', "waiting {{instance}}"),
                ], "none", width=12, height=5,
            ),
        ],
    ),
    Row(
        "What is known of the caches",
        [
            Panel(
                "State", "How well the router that knows least knows each cache. A replica is BLIND until its first event.",
                [Query(f'{gauge("replica_state", "replica", state="degraded")} + 2 * {gauge("replica_state", "replica", state="blind")}', "{{replica}}")],
                kind="state-timeline", width=12, height=5,
                mappings={"0": ("EXACT", GREEN), "1": ("DEGRADED", YELLOW), "2": ("BLIND", RED), "3": ("BLIND", RED)},
            ),
            Panel(
                "Decisions by knowledge of the chosen cache", "blind: guessed from the requests that were routed there.",
                [Query(rate("decisions_total", "state"), "{{state}}")], "reqps", stacked=True, width=6, height=5,
            ),
            Panel("Trust", "Share of recent audited predictions that were right, at the router that trusts it least.", [Query(gauge("trust_ratio", "replica", "min"), "{{replica}}")], "percentunit", width=6, height=5, maximum=1),
            Panel("Blocks known", "By replica and tier.", [Query(gauge("index_blocks", "replica, tier"), "{{replica}} {{tier}}")], "short"),
            Panel(
                "Blocks stored and removed", "As the engines publish them.",
                [Query(rate("kv_events_total", "replica, kind", kind="stored|removed"), "{{replica}} {{kind}}")], "short",
            ),
            Panel(
                "Trouble in the event streams", "Gaps are replayed; truncated and failed count gaps that could not be. undecodable, unknown and untranslated events are not understood.",
                [Query(rate("kv_events_total", "kind", kind="gaps|truncated|failed_replays|restarts|undecodable|unknown_events|unknown_medium|untranslated|contract_misses"), "{{kind}}")], "ops",
            ),
        ],
    ),
    Row(
        "Time spent in the router",
        [
            Panel("Stages, median", "tokenize. place: hash, look up, decide. total: from arrival until the request is sent.", [Query(quantile(0.5, "stage_seconds", "stage"), "{{stage}}")], "s", width=6),
            Panel("Stages, P99", "The same for the slowest 1 %.", [Query(quantile(0.99, "stage_seconds", "stage"), "{{stage}}")], "s", width=6),
            Panel("Lag of the event loop, P99", "How late timers run. Above 20 ms the router is short of CPU.", [Query(quantile(0.99, "loop_lag_seconds", "instance"), "{{instance}}")], "s", width=6, steps=((None, GREEN), (0.02, RED))),
            Panel(
                "Tokens", "by: who tokenized the prompts. wrong: prompts whose tokens differed from the engine's.",
                [
                    Query(rate("tokenized_requests_total", "way"), "by: {{way}}"),
                    Query(rate("token_mismatches_total", "model, against") + OR_NONE, "wrong: {{model}}, against {{against}}"),
                ], "reqps", width=6,
            ),
        ],
    ),
    Row(
        "Redis and other routers",
        [
            Panel(
                "Shared through Redis", "0: this router shares nothing.", [Query(f"warmroute_redis_up{{{ROUTER}}}", "{{instance}}")], kind="state-timeline", width=6,
                mappings={"0": ("alone", RED), "1": ("shared", GREEN)},
            ),
            Panel("Live routers", "As each router counts them.", [Query(f"warmroute_routers{{{ROUTER}}}", "{{instance}}")], "none", width=6),
            Panel("Who writes to Redis", "leading: this router also writes to Redis what it follows. direct: it only follows.", [Query(f"warmroute_feeds{{{ROUTER}}}", "{{instance}} {{role}}")], "none", width=6),
            Panel(
                "Shared changes", "deltas: changes of caches. rewrites, snapshots: all blocks of a replica. gaps, garbage, refused: lost or foreign entries.",
                [Query(rate("sharing_total", "kind"), "{{kind}}")], "ops", width=6,
            ),
        ],
    ),
    Row(
        "Mooncake pool",
        [
            Panel("Answers", "0: the master does not answer, and the pool is not used.", [Query(f"warmroute_pool_up{{{ROUTER}}}", "{{instance}} {{pool}}")], kind="state-timeline", width=6, mappings={"0": ("gone", RED), "1": ("there", GREEN)}),
            Panel(
                "Filled", "Bytes of objects, and capacity of the segments. The master evicts above a watermark.",
                [Query(gauge("pool_allocated_bytes", "pool"), "used {{pool}}"), Query(gauge("pool_capacity_bytes", "pool"), "capacity {{pool}}")], "bytes", width=6,
            ),
            Panel("Blocks known", "By model and pool.", [Query(gauge("pool_blocks", "pool, model"), "{{model}} {{pool}}")], "short", width=6),
            Panel("Age of the last listing", "The keys are listed at the start, after a wrong answer, and every mooncake.list_s.", [Query(gauge("pool_listing_age_seconds", "pool", "min"), "age {{pool}}")], "s", width=6),
            Panel(
                "Verified before a fetch", "confirmed, less, more: what the master has, compared with the directory. late, failed, unnamed: not verified.",
                [Query(rate("pool_verifications_total", "result") + OR_NONE, "{{result}}")], "reqps",
            ),
            Panel(
                "Time to verify", "How long a request waits for the master before it is sent. NaN without fetches.",
                [Query(quantile(q, "pool_verify_seconds") + OR_NONE, f"P{int(q * 100)}") for q in (0.5, 0.99)], "s",
            ),
            Panel(
                "Speed of fetches", "Fitted from times to first token, by replica.",
                [Query(gauge("pool_fetch_bytes_per_second", "replica") + OR_NONE, "{{replica}}")], "Bps",
            ),
        ],
    ),
    Row(
        "Experiments",
        [
            Panel(
                "Requests by variant", "Requests that count for the experiment.",
                [Query(rate("variant_requests_total", "experiment, variant") + OR_NONE, "{{experiment}} {{variant}}")], "reqps",
            ),
            Panel(
                "TTFT by variant, P90", "Variants share caches and queues, unless the design separates them. Read the report before you decide.",
                [Query(quantile(0.9, "variant_ttft_seconds", "experiment, variant") + OR_NONE, "{{experiment}} {{variant}}")], "s",
            ),
            Panel(
                "Share recomputed, by variant", "Share of the variant's prompt tokens.",
                [Query(f'{rate("variant_tokens_total", "experiment, variant", kind="recomputed")} / ({rate("variant_tokens_total", "experiment, variant", kind="prompt")} > 0){OR_NONE}', "{{experiment}} {{variant}}")],
                "percentunit", maximum=1,
            ),
        ],
    ),
    Row(
        "The front",
        [
            Panel(
                "Answers by status", "All that clients got, errors of the front itself among them.",
                [Query('sum by (code) (rate(haproxy_frontend_http_responses_total{job="front",proxy="api"}[$__rate_interval]))', "{{code}}")], "reqps", stacked=True,
            ),
            Panel("Connections of clients", "Open now.", [Query('sum(haproxy_frontend_current_sessions{job="front",proxy="api"})', "open")], "none"),
            Panel(
                "Tried again or given up", "Connections to routers that failed. Nothing is sent twice: only where none was made is another router tried.",
                [
                    Query('sum(rate(haproxy_backend_redispatch_warnings_total{job="front",proxy="routers"}[$__rate_interval]))', "tried at another"),
                    Query('sum(rate(haproxy_backend_connection_errors_total{job="front",proxy="routers"}[$__rate_interval]))', "given up"),
                ], "ops",
            ),
        ],
    ),
]  # fmt: skip


def dashboard() -> dict[str, Any]:
    """Build the whole of it."""
    return {
        "uid": "warmroute",
        "title": "warmroute",
        "description": "Cache-aware routing in front of vLLM replicas, top to bottom.",
        "tags": ["warmroute"],
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "schemaVersion": 39,
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "links": [],
        "annotations": {"list": []},
        "templating": {"list": [DATA_SOURCES, _variable("router", "Router")]},
        "panels": list(_panels()),
    }


DATA_SOURCES = {
    "type": "datasource",
    "name": "datasource",
    "label": "Data source",
    "query": "prometheus",
    "refresh": 1,
    "current": {},  # Grafana's default, if that is a Prometheus
}


def _variable(name: str, label: str) -> dict[str, Any]:
    query = 'label_values(up{job="warmroute"}, instance)'
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": SOURCE,
        "query": {"query": query, "refId": "A"},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panels() -> Iterator[dict[str, Any]]:
    top = number = 0
    for row in ROWS:
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": top},
            "panels": [],
        }
        top += 1
        left = height = 0
        for panel in row.panels:
            if left + panel.width > WIDTH:
                top, left, height = top + height, 0, 0
            number += 1
            yield _panel(number, panel, left, top)
            left, height = left + panel.width, max(height, panel.height)
        top += height


def _panel(number: int, panel: Panel, left: int, top: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "thresholds": {
            "mode": "absolute",
            "steps": [{"value": value, "color": colour} for value, colour in panel.steps],
        },
        "mappings": _mappings(panel),
    }
    if not panel.signed:
        defaults["min"] = 0
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    options: dict[str, Any] = {}
    match panel.kind:
        case "timeseries":
            defaults["custom"] = {
                "drawStyle": "line",
                "lineWidth": 1,
                "fillOpacity": 40 if panel.stacked else 5,
                "stacking": {"mode": "normal" if panel.stacked else "none", "group": "A"},
                "showPoints": "never",
            }
            defaults["color"] = {"mode": "palette-classic"}
            options = {
                "legend": {
                    "displayMode": "list",
                    "placement": "bottom",
                    "showLegend": True,
                    "calcs": [],
                },
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
        case "stat":
            defaults["color"] = {"mode": "thresholds"}
            options = {
                "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
                "colorMode": "value",
                "graphMode": "area",
                "textMode": "auto",
                "justifyMode": "auto",
                "orientation": "auto",
            }
        case "state-timeline":
            defaults["custom"] = {"fillOpacity": 70, "lineWidth": 0}
            defaults["color"] = {"mode": "thresholds"}
            options = {
                "mergeValues": True,
                "showValue": "auto",
                "alignValue": "left",
                "rowHeight": 0.9,
                "legend": {
                    "displayMode": "list",
                    "placement": "bottom",
                    "showLegend": False,
                    "calcs": [],
                },
                "tooltip": {"mode": "single", "sort": "none"},
            }
        case "table":
            defaults["custom"] = {"align": "auto", "cellOptions": {"type": "auto"}}
            defaults["decimals"] = 0
            options = {"showHeader": True}
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": SOURCE,
        "gridPos": {"h": panel.height, "w": panel.width, "x": left, "y": top},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": SOURCE,
                "editorMode": "code",
                "expr": query.expr,
                "legendFormat": query.legend or panel.title,
                **(_AT_ONCE if panel.kind == "table" else {"range": True}),
            }
            for i, query in enumerate(panel.queries)
        ],
        **({"transformations": [_COLUMNS]} if panel.kind == "table" else {}),
    }


_AT_ONCE = {"instant": True, "range": False, "format": "table"}  # one value a label, not a line
_COLUMNS = {
    "id": "organize",
    "options": {"excludeByName": {"Time": True}, "renameByName": {"Value": "tokens"}},
}


def _mappings(panel: Panel) -> list[dict[str, Any]]:
    if not panel.mappings:
        return []
    shown = {
        value: {"text": text, "color": colour, "index": i}
        for i, (value, (text, colour)) in enumerate(panel.mappings.items())
    }
    return [{"type": "value", "options": shown}]


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write dashboards/warmroute.json.")
    parser.add_argument("--check", action="store_true", help="change nothing; status 1 if old")
    args = parser.parse_args()
    is_old = not FILE.exists() or FILE.read_text() != text()
    if is_old and not args.check:
        FILE.write_text(text())
        print(f"{FILE.name}: rewritten")
    elif is_old:
        print(f"{FILE.name}: old; run `make docs`")
    return int(is_old and args.check)


if __name__ == "__main__":
    raise SystemExit(main())
