"""What earlier releases read: what to do if a configuration still has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

REMOVED: Final[Mapping[str, str]] = {
    "discovery.file": "write the replicas into the configuration file, set "
    "discovery.follow_config, and remove the key",
    "experiment.definitions": "there is one experiment; write its keys below `experiment`",
    "experiment.control": "the first variant is the control; remove the key",
    "experiment.holdout": "give variants shares that sum to less than 1; remove the key",
    "experiment.ramp": "change the variants' shares in the file, and send SIGHUP; remove the key",
    "experiment.guardrails": "use the alert VariantWorse; remove the key",
    "experiment.seed": "another name draws other variants; remove the key",
    "experiment.variants[].params": "write them into the policy: `kv_aware:alpha=0`",
    "experiment.variants[].queue": "write it into the policy: `kv_aware:queue.mode=off`",
    "listen.workers": "start several routers with --share-port, a port and a Redis in common, an "
    "--admin-port each (docs/operate/all-cores.md); remove the key",
    "shadow": "ask other policies later, with `warmroute redecide`; remove the section",
    "queue.window": "a replica has one prompt ready, or 300 ms of short prompts; remove the key",
    "queue.ready_ms": "a replica has one prompt ready, or 300 ms of short prompts; remove the key",
    "queue.patience": "use queue.mode off, queue.fill or queue.max_wait_s; remove the key",
    "queue.batch_max_wait_s": "it is twice queue.max_wait_s; remove the key",
    "queue.quantum_s": "it is 5 s of compute; use a tenant's weight, and remove the key",
    "queue.batch_deadline_s": "batch requests have x-warmroute-deadline-ms; remove the key",
    "queue.max_requests": "10,000 requests may wait, others get 429; remove the key",
    "tenants[].requests_per_minute": "limit rates in the gateway in front; remove the key",
    "tenants[].uncached_tokens_per_minute": "limit rates in the gateway in front; remove the key",
    "limits.websockets": "route WebSockets to a replica; remove the key",
    "limits.websocket_idle_s": "route WebSockets to a replica; remove the key",
    "forward.diagnostics": "answers are not changed; use `warmroute why`, and remove the key",
    "forward.continue_streams": "a broken stream ends with an error event; remove the key",
    "listen.allowed_origins": "restrict web pages in the proxy in front, and remove the key",
    "limits.connections_per_address": "limit connections in the proxy in front; remove the key",
    "redis.log_entries": "notes are published and not kept; remove the key",
    "early.min_tokens": "it is 512 tokens; use early.mode off, or remove the key",
    "mooncake.events": "the router lists and verifies the pool instead; remove the key",
    "mooncake.pools[].events": "the router lists and verifies the pool instead; remove the key",
}

ONLY_MAPPINGS: Final[Mapping[str, str]] = {
    "mooncake.pools": "write {name: NAME, master: URL} in mooncake.pools of the file",
}
"""Lists whose entries were also text, in flags and variables, too: what to write instead."""
