"""Keys that were removed: what to do if a configuration still has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_TODAY: Final = {
    "discovery.empty_s": "60",
    "events.replay_timeout_s": "5",
    "forward.overdue_floor_s": "10",
    "forward.overdue_ratio": "3",
    "forward.retry_backoff_s": "0.05",
    "limits.header_bytes": "16,384",
    "limits.header_timeout_s": "15",
    "mooncake.poll_s": "1",
    "mooncake.timeout_s": "5",
    "mooncake.verify_keys": "512",
    "policy.first_blocks_tokens": "2,048",
    "session.max_sessions": "100,000",
    "tokens.inline_chars": "32,768",
}
"""Keys that nobody had a reason to set, and the value that each has now."""

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
    "tenants[].requests_per_minute": "limit rates in the gateway in front; remove the key",
    "tenants[].uncached_tokens_per_minute": "limit rates in the gateway in front; remove the key",
    "limits.websockets": "route WebSockets to a replica; remove the key",
    "limits.websocket_idle_s": "route WebSockets to a replica; remove the key",
    "listen.allowed_origins": "restrict web pages in the proxy in front, and remove the key",
    "limits.connections_per_address": "limit connections in the proxy in front; remove the key",
    "early.min_tokens": "it is 512 tokens; use early.mode off, or remove the key",
    **{key: f"it is {value}; remove the key" for key, value in _TODAY.items()},
}
