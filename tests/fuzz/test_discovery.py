"""Fuzz: what sources of replicas say is followed, left out or refused in words; nothing else."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from hypothesis import strategies as st

from router.base.errors import DiscoveryError
from router.config import DiscoveryConfig, ReplicaConfig
from router.config.hosts import HostRules
from router.discovery.endpoint_slices import replicas_in
from router.discovery.kubernetes_api import Expired, SliceChange, change_of
from router.discovery.sources import why_refused
from router.replicas.registry import Registry
from router.replicas.replica import Found
from tests.discovery.fake_kubernetes import endpoint, slice_of
from tests.fuzz.budget import fuzz
from tests.fuzz.mutations import twisted

HOSTS = HostRules(DiscoveryConfig().hosts)
EVENT = {
    "type": "ADDED",
    "object": slice_of(
        endpoint("10.0.0.1", "vllm-a", ready=True),
        endpoint("10.0.0.2", "vllm-b", ready=False, serving=True, terminating=True),
        labels={"warmroute.io/role": "prefill"},
    ),
}


def enter(found: list[Found]) -> None:
    """Follow what may be followed; every entry is one that may."""
    registry = Registry()
    registry.follow("x", [each for each in found if why_refused(each, HOSTS) is None])
    for entry in registry.entries:
        assert HOSTS.refused([entry.replica.url]) is None
        assert "169.254." not in entry.replica.url


@fuzz(twisted(st.just(EVENT)))
def test_a_line_of_a_watch(tree: Any) -> None:
    """Of an API server that lies: no more than an endpoint where one may be."""
    change = None
    with suppress(DiscoveryError, Expired):
        change = change_of(json.dumps(tree, default=repr).encode())
    if isinstance(change, SliceChange):
        for port in (None, "http", "8000"):
            with suppress(DiscoveryError):
                enter(replicas_in([change.part], port))


@fuzz(st.text(max_size=60), st.text(max_size=20) | st.none())
def test_an_address_of_anything(url: str, name: str | None) -> None:
    """Whatever it is, it is refused with a reason or is an address."""
    for each in (url, f"http://{url}", f"http://{url}:8000", f"http://10.0.0.1{url}"):
        enter([Found(replica=ReplicaConfig(url=each, name=name))])
