"""What engines are: their release, and which half of a request each computes.

Some releases of vLLM follow other rules than the one before, which events do not show. What must
live here: reading a version. What must not: the rules; each is where it is applied.

role      both      the prompt and the answer: every replica without another role
          prefill   prompts for others: it gets no request of a client
          decode    answers; prompts where that is cheaper than a transfer
transfer  store     through the shared pool (MooncakeStoreConnector)
          mooncake  from engine to engine (MooncakeConnector), both asked at once
          nixl      from engine to engine (NixlConnector), one after the other
"""

from __future__ import annotations

import re
from typing import Final, Literal

Release = tuple[int, int]

V0_32: Final[Release] = (0, 32)
V0_33: Final[Release] = (0, 33)


def is_at_least(version: str | None, release: Release) -> bool:
    """Return whether a version is of this release or a later one; False: it is not known."""
    numbers = re.match(r"(\d{1,4})\.(\d{1,4})", version or "")
    return numbers is not None and (int(numbers[1]), int(numbers[2])) >= release


def rules_of(version: str | None) -> Release:
    """Return the release whose rules a prompt is made by."""
    return V0_33 if is_at_least(version, V0_33) else V0_32


def in_order(version: str) -> tuple[int, ...]:
    """Return a version's numbers, to be compared with those of others."""
    return tuple(int(number) for number in re.findall(r"\d{1,9}", version)[:3])


Role = Literal["both", "prefill", "decode"]
Transfer = Literal["store", "mooncake", "nixl"]

BOOTSTRAP_PORT: Final = 8998
"""Where a MooncakeConnector that prefills tells its name, unless VLLM_MOONCAKE_BOOTSTRAP_PORT says
otherwise. Source: vllm/envs.py, 0.32.0."""

ROLE_OF_KIND: Final[dict[str, Role]] = {
    "kv_producer": "prefill",
    "kv_consumer": "decode",
    "kv_both": "both",
}
"""vLLM's `kv_role` in our words."""

TRANSFER_OF_CONNECTOR: Final[dict[str, Transfer]] = {
    "MooncakeStoreConnector": "store",
    "MooncakeConnector": "mooncake",
    "NixlConnector": "nixl",
    "NixlPullConnector": "nixl",
    "NixlPushConnector": "nixl",
}
"""vLLM's connectors that we can speak to. Source: kv_connector/factory.py, 0.32.0."""
