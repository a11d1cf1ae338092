"""What Compose makes of the files: pinned, unprivileged, checked. Nothing is started here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from router import config
from tests.compose.stacks import COMPOSE, COMPOSE_GPU, COMPOSE_MINIMAL, DOCKER
from tests.containers.stack import resolved

FILES = (COMPOSE, COMPOSE_GPU, COMPOSE_MINIMAL)

# Its own user is root: weights and compiled kernels are in caches that root owns. Its file system
# cannot be read-only: docker/compose#12031 for a file given in the compose file.
ENGINE = "vllm/vllm-openai"

Service = dict[str, Any]

each_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)


@cache
def project(file: Path, transport: str = "tcp") -> dict[str, Any]:
    return resolved(file, MOONCAKE_PROTOCOL=transport)


def services(file: Path) -> Iterator[tuple[str, Service]]:
    yield from project(file)["services"].items()


def is_engine(name: str, service: Service) -> bool:
    return service["image"].startswith(ENGINE) and name != "mooncake-master"


def seconds(duration: str) -> int:
    """Read what Go writes: 1m30s."""
    parts = re.fullmatch(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", duration)
    assert parts is not None, duration
    hours, minutes, rest = (int(part or 0) for part in parts.groups())
    return hours * 3600 + minutes * 60 + rest


@each_file
def test_images_are_pinned(file: Path) -> None:
    """To a release, not to what is newest today."""
    for _, service in services(file):
        assert re.search(r":v?\d+\.\d+\.\d+", service["image"]), service["image"]


@each_file
def test_nothing_is_privileged(file: Path) -> None:
    """No capabilities, no new privileges, no root, read-only but for what is listed."""
    for name, service in services(file):
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert not service.get("privileged"), name
        assert not service.get("cap_add"), name
        if not is_engine(name, service):
            assert service["user"].partition(":")[0].isdigit(), name
            assert int(service["user"].partition(":")[0]) > 0, name
            assert service["read_only"] is True, name


@each_file
def test_everything_has_a_health_check_and_limits(file: Path) -> None:
    """And comes back, and its logs end."""
    for name, service in services(file):
        health, resources = service["healthcheck"], service["deploy"]["resources"]

        assert seconds(health["timeout"]) < seconds(health["interval"]), name
        assert service["restart"] == "unless-stopped", name
        assert service["logging"]["options"]["max-size"], name
        if is_engine(name, service):
            assert resources["reservations"]["devices"], name  # a GPU; memory as it needs
        else:
            assert resources["limits"].keys() == {"cpus", "memory"}, name


@each_file
def test_only_the_api_is_for_others(file: Path) -> None:
    """Every published port is on loopback, but for the API's where its variable says otherwise."""
    opened = resolved(file, BIND_ADDRESS="0.0.0.0")["services"]

    for name, service in services(file):
        assert {port["host_ip"] for port in service.get("ports", ())} <= {"127.0.0.1"}, name
    hosts = {n: {p["host_ip"] for p in s.get("ports", ())} for n, s in opened.items()}
    assert [name for name, found in hosts.items() if "0.0.0.0" in found] == [
        "router" if file == COMPOSE_MINIMAL else "front"
    ]


@each_file
def test_what_is_mounted_is_there(file: Path) -> None:
    """Files of the project exist: Docker would make a directory of that name."""
    for name, service in services(file):
        for mount in service.get("volumes", ()):
            source = Path(mount["source"])
            if mount["type"] == "bind" and source.is_relative_to(DOCKER):
                assert source.exists() or mount["target"] == "/models", (name, source)


@pytest.mark.parametrize("file", [COMPOSE, COMPOSE_GPU], ids=lambda file: file.name)
def test_routers_get_the_time_to_drain(file: Path) -> None:
    """Docker waits for longer than a router drains, and that begins after the front has noticed."""
    listen = config.load(DOCKER / file.name.replace("compose", "warmroute")).listen
    haproxy = (DOCKER / "haproxy" / "haproxy.cfg").read_text()
    check = re.search(r"check inter (\d+)s fall (\d+)", haproxy)
    assert check is not None

    for name in ("router-1", "router-2"):
        grace_s = seconds(project(file)["services"][name]["stop_grace_period"])
        assert grace_s >= listen.drain_grace_s + listen.drain_s + 5
    assert listen.drain_grace_s > int(check[1]) * int(check[2]) + int(check[1])


def test_rdma_is_one_variable() -> None:
    """It adds devices and locked memory to the replicas, and changes the protocol; nothing else."""
    tcp, rdma = (project(COMPOSE_GPU, transport) for transport in ("tcp", "rdma"))

    for name in ("replica-1", "replica-2"):
        one, other = tcp["services"][name], rdma["services"][name]
        differ = {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}
        assert differ == {"devices", "cap_add", "ulimits", "environment"}
        (device,) = other["devices"]
        assert "/dev/infiniband" in str(device)
        assert other["cap_add"] == ["IPC_LOCK"]
        assert other["ulimits"]["memlock"] == {"soft": -1, "hard": -1}
    contents = [found["configs"]["mooncake"]["content"] for found in (tcp, rdma)]
    assert contents[0].replace('"tcp"', '"rdma"') == contents[1]
    assert tcp["services"]["router-1"] == rdma["services"]["router-1"]


def test_the_gpu_stack_is_the_other_one_with_other_replicas() -> None:
    """Same services; what is not about replicas is taken from compose.yaml as it is."""
    plain, gpu = project(COMPOSE), project(COMPOSE_GPU)

    assert gpu["services"].keys() - plain["services"].keys() == {"mooncake-master"}
    assert plain["services"].keys() <= gpu["services"].keys()
    for name in ("front", "redis", "grafana"):
        assert gpu["services"][name] == plain["services"][name]
    for key in ("networks", "volumes"):
        assert gpu[key].keys() == plain[key].keys()


def test_replicas_differ_where_they_must() -> None:
    """Two on one host: ports and sockets of their own, the same hashes, model and pool."""
    one, two = (project(COMPOSE_GPU)["services"][f"replica-{number}"] for number in (1, 2))

    ports = [re.findall(r"(?::|port=)(\d{4})\b", " ".join(s["command"])) for s in (one, two)]
    sockets = [re.findall(r'"lookup_rpc_port":(\d)', " ".join(s["command"])) for s in (one, two)]
    assert len(ports[0]) == 3
    assert not set(ports[0]) & set(ports[1])
    assert sockets == [["1"], ["2"]]
    assert one["environment"] == two["environment"]
    same = [re.sub(r"(?<=[:=])\d{4}|(?<=port\":)\d", "N", word) for word in one["command"]]
    assert same == [re.sub(r"(?<=[:=])\d{4}|(?<=port\":)\d", "N", word) for word in two["command"]]
