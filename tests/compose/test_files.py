"""The compose files: valid, pinned, unprivileged, checked, explained. Nothing is started here."""

from __future__ import annotations

import json
import re
import stat
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from router import config
from tests.compose.model import Project, Service, dotenv, parse
from tests.compose.runner import ROOT
from tests.compose.stacks import COMPOSE, COMPOSE_GPU, DOCKER, FILES, make_secrets, project

# compose-spec.json as released with check-jsonschema 0.39.0; Apache-2.0, its licence is beside it.
SCHEMA = json.loads((ROOT / "tests/data/compose-spec/compose-spec.json").read_text())
ALL = sorted(DOCKER.glob("*.yaml"))
COMPOSE_FILES = [file for file in ALL if "services" in parse(file.read_text())]

# Images whose own user is root, and why they stay so.
ROOTS = {"vllm/vllm-openai"}  # weights and compiled kernels are in caches that root owns
# What cannot have a read-only root: docker/compose#12031 for a file given in the compose file.
WRITABLE = {"vllm/vllm-openai"}


@cache
def read(file: Path, transport: str = "tcp") -> Project:
    return project(file, Path("/nowhere"), {"MOONCAKE_PROTOCOL": transport})


def services() -> list[Any]:
    return [
        pytest.param(file, service, id=f"{file.stem}-{service.name}")
        for file in FILES
        for service in read(file).services.values()
    ]


each_service = pytest.mark.parametrize(("file", "service"), services())


@pytest.mark.parametrize("file", COMPOSE_FILES, ids=lambda file: file.name)
def test_the_specifications_schema_accepts_it(file: Path) -> None:
    """As written, and with its variables put in."""
    errors = list(Draft202012Validator(SCHEMA).iter_errors(parse(file.read_text())))
    assert [f"{error.json_path}: {error.message}" for error in errors] == []
    if file in FILES:
        errors = list(Draft202012Validator(SCHEMA).iter_errors(read(file).raw))
        assert [f"{error.json_path}: {error.message}" for error in errors] == []


@each_service
def test_images_are_pinned(file: Path, service: Service) -> None:
    """To a release, not to what is newest today."""
    tag = service.image.rpartition(":")[2]

    assert re.search(r"\d+\.\d+\.\d+", tag), service.image


@each_service
def test_nothing_is_privileged(file: Path, service: Service) -> None:
    """No capabilities, no new privileges, no root, read-only but for what is listed."""
    repository = service.image.rpartition(":")[0]
    raw = service.raw

    assert raw["cap_drop"] == ["ALL"]
    assert raw["security_opt"] == ["no-new-privileges:true"]
    assert not raw.get("privileged")
    assert set(raw.get("cap_add", ())) == set()
    if repository not in ROOTS or service.name == "mooncake-master":
        user = str(raw["user"]).partition(":")[0]
        assert user.isdigit()
        assert int(user) > 0
    if repository not in WRITABLE or service.name == "mooncake-master":
        assert raw["read_only"] is True


@each_service
def test_everything_has_a_health_check_and_limits(file: Path, service: Service) -> None:
    """And comes back, and its logs end."""
    raw = service.raw
    limits = raw["deploy"]["resources"].get("limits", {})

    assert service.health is not None
    assert service.health.timeout_s < service.health.interval_s
    assert raw["restart"] == "unless-stopped"
    assert raw["logging"]["options"]["max-size"]
    if service.image.startswith("vllm/") and service.name != "mooncake-master":
        assert raw["deploy"]["resources"]["reservations"]["devices"]  # a GPU; memory as it needs
    else:
        assert limits.keys() == {"cpus", "memory"}


@each_service
def test_only_the_front_is_for_others(file: Path, service: Service) -> None:
    """Every published port is on loopback, but for the API's where its variable says otherwise."""
    for port in service.ports:
        assert port.host == "127.0.0.1"
    raw = parse(file.read_text())["services"][service.name]
    open_to_all = [port for port in raw.get("ports", ()) if "BIND_ADDRESS" in port]
    assert not open_to_all or service.name == "front"


@each_service
def test_what_is_mounted_is_there(file: Path, service: Service) -> None:
    """Files of the project exist; secrets are made by secrets.sh."""
    for mount in service.mounts:
        if mount.source is not None and mount.source.is_relative_to(DOCKER):
            assert mount.source.exists() or mount.target == "/models", mount.source


def test_rdma_is_one_variable() -> None:
    """It adds devices and locked memory to the replicas, and changes the protocol; nothing else."""
    tcp, rdma = (read(COMPOSE_GPU, transport) for transport in ("tcp", "rdma"))

    for name in ("replica-1", "replica-2"):
        one, other = tcp.services[name].raw, rdma.services[name].raw
        differ = {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}
        assert differ == {"devices", "cap_add", "ulimits", "environment"}
        assert other["devices"] == ["/dev/infiniband:/dev/infiniband"]
        assert other["cap_add"] == ["IPC_LOCK"]
        assert other["ulimits"]["memlock"] == {"soft": -1, "hard": -1}
    contents = [p.raw["configs"]["mooncake"]["content"] for p in (tcp, rdma)]
    assert contents[0].replace('"tcp"', '"rdma"') == contents[1]
    assert tcp.services["router-1"] == rdma.services["router-1"]


def test_the_gpu_stack_is_the_other_one_with_other_replicas() -> None:
    """Same services; what is not about replicas is taken from compose.yaml as it is."""
    plain, gpu = read(COMPOSE), read(COMPOSE_GPU)

    assert gpu.services.keys() - plain.services.keys() == {"mooncake-master"}
    assert plain.services.keys() <= gpu.services.keys()
    for name in ("front", "redis", "grafana"):
        assert gpu.services[name] == plain.services[name]
    for key in ("networks", "volumes"):
        assert gpu.raw[key] == plain.raw[key]


def test_replicas_differ_where_they_must() -> None:
    """Two on one host: ports and sockets of their own, hashes, model and pool alike."""
    one, two = (read(COMPOSE_GPU).services[f"replica-{i}"] for i in (1, 2))
    assert one.command is not None
    assert two.command is not None

    ports = [re.findall(r"(?::|port=)(\d{4})\b", " ".join(s.command or ())) for s in (one, two)]
    sockets = [re.findall(r'"lookup_rpc_port":(\d)', " ".join(s.command or ())) for s in (one, two)]
    assert len(ports[0]) == 3
    assert not set(ports[0]) & set(ports[1])
    assert sockets == [["1"], ["2"]]
    assert one.environment == two.environment
    same = [re.sub(r"(?<=[:=])\d{4}|(?<=port\":)\d", "N", word) for word in one.command]
    assert same == [re.sub(r"(?<=[:=])\d{4}|(?<=port\":)\d", "N", word) for word in two.command]


def test_every_variable_is_explained_and_used() -> None:
    """In .env: a comment before it, the default of the files, and a file that uses it."""
    text = (DOCKER / ".env").read_text()
    known = dotenv(DOCKER / ".env")
    used: dict[str, set[str]] = {}
    for file in ALL:
        for name, default in re.findall(r"\$\{(\w+)(?::-([^}]*))?\}", file.read_text()):
            used.setdefault(name, set()).add(default)

    assert used.keys() == known.keys()
    for name, defaults in used.items():
        assert defaults == {known[name]}, name
    # A variable follows a comment, or another variable that the same comment is about.
    assert not re.search(r"\n\n[A-Z]", text)


def test_secrets_are_made_once(tmp_path: Path) -> None:
    """Random, readable by the containers, in a directory that is not; and never made anew."""
    made = make_secrets(tmp_path / "one")
    before = {file.name: file.read_text() for file in made.iterdir()}
    make_secrets(made)
    other = {f.name: f.read_text() for f in make_secrets(tmp_path / "two").iterdir()}

    assert before == {file.name: file.read_text() for file in made.iterdir()}
    declared = {
        entry["file"].rpartition("/")[2] for entry in read(COMPOSE_GPU).raw["secrets"].values()
    }
    assert before.keys() == declared
    for name in declared - {"hf_token"}:
        assert re.fullmatch(r"[0-9a-f]{48}", before[name])
        assert before[name] != other[name]
    assert stat.S_IMODE(made.stat().st_mode) == 0o700


def test_no_secret_is_in_the_repository() -> None:
    """What secrets.sh makes is ignored by git and left out of images."""
    ignored = subprocess.run(
        ["git", "check-ignore", "docker/secrets/admin_token"], cwd=ROOT, check=False
    )

    assert ignored.returncode == 0 or not (ROOT / ".git").exists()
    let_in = re.findall(r"^!docker.*", (ROOT / ".dockerignore").read_text(), flags=re.MULTILINE)
    assert all(re.fullmatch(r"!docker/requirements-\w+\.txt", line) for line in let_in)


@pytest.mark.parametrize("name", ["warmroute.yaml", "warmroute.gpu.yaml"])
def test_the_routers_accept_their_files(name: str) -> None:
    """By the loader itself; replicas have the names of the services."""
    loaded = config.load(DOCKER / name)

    assert [replica.name for replica in loaded.replicas] == ["replica-1", "replica-2"]
    assert loaded.redis.password_file == Path("/run/secrets/redis_password")
    assert loaded.admin.token_file == Path("/run/secrets/admin_token")


def test_the_fronts_limits_are_longer_than_the_routers() -> None:
    """So that it is the router that answers, in the API's own shape."""
    text = (DOCKER / "haproxy" / "haproxy.cfg").read_text()
    forward = config.load(DOCKER / "warmroute.gpu.yaml").forward

    for side in ("server", "client"):
        minutes = re.search(rf"timeout {side} (\d+)m", text)
        assert minutes is not None
        assert int(minutes[1]) * 60 > forward.first_byte_timeout_s + forward.connect_timeout_s


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_routers_get_the_time_to_drain(file: Path) -> None:
    """Docker waits for longer than a router drains, and that begins after the front has noticed."""
    listen = config.load(DOCKER / file.name.replace("compose", "warmroute")).listen
    haproxy = (DOCKER / "haproxy" / "haproxy.cfg").read_text()
    check = re.search(r"check inter (\d+)s fall (\d+)", haproxy)
    assert check is not None

    for name in ("router-1", "router-2"):
        grace_s = read(file).services[name].stop_grace_s
        assert grace_s >= listen.drain_grace_s + listen.drain_s + 5
    assert listen.drain_grace_s > int(check[1]) * int(check[2]) + int(check[1])


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_what_a_stack_needs_of_docker_is_written_down(name: str) -> None:
    """`start_interval` is new in Engine 25; before, the file is refused."""
    text = (ROOT / "docker" / name).read_text()
    page = (ROOT / "docs/operate/deploy.md").read_text()

    assert "start_interval" in text
    assert "Docker Engine 25" in text
    assert re.search(rf"`docker/{re.escape(name)}`.*Docker Engine 25", page)
