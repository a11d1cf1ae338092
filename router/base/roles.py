"""Which half of a request a replica computes, and how KV gets from one half to the other.

role      both      the prompt and the answer: every replica without another role
          prefill   prompts for others: it gets no request of a client
          decode    answers; prompts where that is cheaper than a transfer
transfer  store     through the shared pool (MooncakeStoreConnector)
          mooncake  from engine to engine (MooncakeConnector), both asked at once
          nixl      from engine to engine (NixlConnector), one after the other
"""

from __future__ import annotations

from typing import Final, Literal

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
