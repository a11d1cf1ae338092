"""Made-up states of the admin port's feed."""

from __future__ import annotations

from typing import Any

from router.observers.live.degraded import degraded

COLUMNS = ["cached", "new", "moved", "last_block"]
REPLICA = {
    "id": "r1", "state": "up", "reason": "", "cache": "exact", "cache_reason": "",
    "live_fill": 1.25, "cache_fill": 0.5, "num_requests": 3, "queue_ms": 1500.0, "num_sessions": 2,
    "right": 9, "audited": 10, "has_several_engines": False, "publishes_events": True,
    "caches_prefixes": True, "awaits_events": False,
}  # fmt: skip


def state(*replicas: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """A state of the feed: all is well, but for what is given."""
    found = {
        "kind": "state",
        "recent": {
            "window_s": 60, "requests": 0, "failed": 0, "failures": [], "ttft_p50_s": None,
            "ttft_p99_s": None,
        },
        "router": {"version": "1", "policy": "kv_aware", "up_s": 7300, "replaced_policies": [],
            "unresolved": [],
        },
        "replicas": {
            "total": len(replicas), "by_cache": {"exact": 1}, "by_state": {"up": 1}, "requests": 3,
            "shown": list(replicas), "missing": [], "num_missing": 0, "unserved": [],
        },
        "queue": {"on": True, "waiting": 0, "longest_s": 0.0, "for": {}, "shown": [],
                  "held_tokens": {}},
        "tokens": {"columns": COLUMNS, "step_s": 10.0, "steps": []},
        "sessions": {"total": 0, "shown": []},
        "findings": [],
        "tokenizers": [],
        "sources": [],
        "pools": [],
        "sharing": None,
    } | sections  # fmt: skip
    return found | {"degraded": degraded(found)}
