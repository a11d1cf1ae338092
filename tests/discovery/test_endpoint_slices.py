"""router.discovery.endpoint_slices: slices as the control plane writes them, and their replicas."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from router.base.errors import DiscoveryError
from router.config.hosts import HostRules
from router.discovery.endpoint_slices import COST_LABEL, POOL_LABEL, Slice, replicas_in
from router.discovery.sources import why_refused
from tests.discovery.fake_kubernetes import endpoint, slice_of

IPV6: dict[str, Any] = {"name": "vllm-6", "addressType": "IPv6"}


def found(*slices: dict[str, Any], port: str | None = None) -> dict[str, str]:
    """Name each replica's state by its address."""
    read = [msgspec.convert(each, Slice) for each in slices]
    return {
        each.replica.url.removeprefix("http://"): (each.replica.name or "-")
        + ("" if each.is_ready else " not ready")
        for each in replicas_in(read, port)
    }


@pytest.mark.parametrize(
    ("slices", "expected"),
    [
        ([slice_of()], {}),
        ([slice_of(endpoint("10.0.0.1", "a"))], {"10.0.0.1:8000": "a"}),  # conditions unknown
        ([slice_of(endpoint("10.0.0.1", "a", ready=True))], {"10.0.0.1:8000": "a"}),
        ([slice_of(endpoint("10.0.0.1", "a", ready=False))], {"10.0.0.1:8000": "a not ready"}),
        (
            [slice_of(endpoint("10.0.0.1", "a", ready=False, serving=True, terminating=True))],
            {},
        ),
        ([slice_of(endpoint("10.0.0.1", "a", ready=False, terminating=True))], {}),
        ([slice_of(endpoint("10.0.0.1"))], {"10.0.0.1:8000": "-"}),  # no pod: written by hand
        ([slice_of(endpoint("10.0.0.1", "a" * 70))], {"10.0.0.1:8000": "-"}),
        (  # two slices
            [slice_of(endpoint("10.0.0.2", "b")), slice_of(endpoint("10.0.0.1", "a"), name="z")],
            {"10.0.0.1:8000": "a", "10.0.0.2:8000": "b"},
        ),
        (  # one endpoint in two while they are rearranged: the ready one counts
            [
                slice_of(endpoint("10.0.0.1", "a", ready=False)),
                slice_of(endpoint("10.0.0.1", "a", ready=True), name="z"),
            ],
            {"10.0.0.1:8000": "a"},
        ),
        (  # both families: one replica
            [slice_of(endpoint("fd00::1", "a"), **IPV6), slice_of(endpoint("10.0.0.1", "a"))],
            {"10.0.0.1:8000": "a"},
        ),
        ([slice_of(endpoint("fd00::1", "a"), **IPV6)], {"[fd00::1]:8000": "a"}),
        ([slice_of(endpoint("engine.example"), addressType="FQDN")], {}),
        ([slice_of({"addresses": [], "conditions": {}})], {}),
        ([slice_of({"addresses": ["10.0.0.1", "10.0.0.2"]})], {"10.0.0.1:8000": "-"}),
    ],
)
def test_slices_are_merged(slices: list[dict[str, Any]], expected: dict[str, str]) -> None:
    assert found(*slices) == expected


PORTS = [{"name": "http", "port": 8000}, {"name": "metrics", "port": 9000}]


@pytest.mark.parametrize(
    ("ports", "port", "number"),
    [
        (PORTS, "metrics", 9000),
        (PORTS, "8080", 8080),
        (None, "8080", 8080),
        (PORTS[:1], None, 8000),
    ],
)
def test_the_port_is_named_or_the_only_one(ports: object, port: str | None, number: int) -> None:
    assert list(found(slice_of(endpoint("10.0.0.1"), ports=ports), port=port)) == [
        f"10.0.0.1:{number}"
    ]


@pytest.mark.parametrize(
    ("fields", "port", "reason"),
    [
        ({"ports": PORTS}, None, r"not one port but several.*http \(8000\), metrics \(9000\)"),
        ({"ports": PORTS}, "grpc", "no port 'grpc'"),
        ({"ports": None}, None, "it has: none"),
        ({"ports": [{"name": "http"}]}, "http", "no port 'http'"),
        ({"endpoints": [endpoint("10.0.0.1/x@y")]}, None, "is not an address"),
        ({"labels": {"warmroute.io/role": "cook"}}, None, "'cook' is not both, prefill or decode"),
        ({"labels": {COST_LABEL: "dear"}}, None, "cost-per-hour: 'dear' is not a number above 0"),
        ({"labels": {COST_LABEL: "0"}}, None, "cost-per-hour: '0' is not a number above 0"),
    ],
)
def test_senseless_slices_are_refused(fields: Any, port: str | None, reason: str) -> None:
    with pytest.raises(DiscoveryError, match=reason):
        found(slice_of(endpoint("10.0.0.1"), **fields), port=port)


HOSTS = HostRules(("10.0.0.0/8",))


def test_a_label_of_the_service_says_the_pool() -> None:
    labelled = slice_of(endpoint("10.0.0.1"), labels={POOL_LABEL: "east"})
    (each,) = replicas_in([msgspec.convert(labelled, Slice)], None)

    assert each.replica.pool == "east"
    assert why_refused(each, HOSTS, ("east", "west")) is None
    assert why_refused(each, HOSTS, ("west",)) == (
        "pool: unknown pool 'east'; write west, or false"
    )


@pytest.mark.parametrize(
    ("labels", "role", "cost"),
    [({"warmroute.io/role": "prefill"}, "prefill", None), ({COST_LABEL: "2.5"}, "both", 2.5)],
)
def test_labels_of_the_service_say_the_role_and_what_an_hour_costs(
    labels: dict[str, str], role: str, cost: float | None
) -> None:
    labelled = slice_of(endpoint("10.0.0.1"), labels=labels)
    (each,) = replicas_in([msgspec.convert(labelled, Slice)], None)

    assert (each.replica.role, each.replica.cost_per_hour) == (role, cost)
