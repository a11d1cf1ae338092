"""Keys of earlier releases: what to do if a configuration still has one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

REMOVED: Final[Mapping[str, str]] = {
    "forward.continue_streams": "a broken stream ends with an error event; remove the key",
    "experiment.definitions[].arms[].replicas": "use design switchback instead of partition",
    "arms[].replicas": "use design switchback instead of partition",
    "mooncake.events": "the router lists and verifies the pool instead; remove the key",
    "mooncake.pools[].events": "the router lists and verifies the pool instead; remove the key",
}
