"""The compose files: valid, explained, and what they mount is accepted. Nothing is started here.

What Compose makes of them is checked in tests/containers.
"""

from __future__ import annotations

import json
import re
import shlex
import stat
import subprocess
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from router import config
from tests.compose.stacks import COMPOSE_GPU, COMPOSE_MINIMAL, DOCKER, ROOT, dotenv, make_secrets

# compose-spec.json as released with check-jsonschema 0.39.0; Apache-2.0, its licence is beside it.
SCHEMA = json.loads((ROOT / "tests/data/compose-spec/compose-spec.json").read_text())
ALL = sorted(DOCKER.glob("*.yaml"))
COMPOSE_FILES = [file for file in ALL if "services" in yaml.safe_load(file.read_text())]


@pytest.mark.parametrize("file", COMPOSE_FILES, ids=lambda file: file.name)
def test_the_specifications_schema_accepts_it(file: Path) -> None:
    errors = list(Draft202012Validator(SCHEMA).iter_errors(yaml.safe_load(file.read_text())))
    assert [f"{error.json_path}: {error.message}" for error in errors] == []


def test_every_variable_is_explained_and_used() -> None:
    """In .env: a comment before it, the default of the files, and a file that uses it."""
    text = (DOCKER / ".env").read_text()
    known = dotenv()
    used: dict[str, set[str]] = {}
    for file in ALL:
        for name, default in re.findall(r"\$\{(\w+)(?::?-([^}]*))?\}", file.read_text()):
            used.setdefault(name, set()).add(default)

    assert used.keys() == known.keys()
    for name, defaults in used.items():
        assert defaults == {known[name]}, name
    # A variable follows a comment, or another variable that the same comment is about.
    assert not re.search(r"\n\n[A-Z]", text)


def test_routers_of_containers_listen_for_others() -> None:
    """Each stack says so itself: the default is loopback."""
    minimal = yaml.safe_load(COMPOSE_MINIMAL.read_text())["services"]["router"]
    files = [config.load(DOCKER / name) for name in ("warmroute.yaml", "warmroute.gpu.yaml")]

    assert "--host=0.0.0.0" in minimal["command"]
    assert [loaded.listen.host for loaded in files] == ["0.0.0.0"] * 2


def test_the_live_page_of_the_minimal_stack_is_for_this_machine_alone() -> None:
    """The port is published on loopback; `warmroute page` prints its address by default."""
    router = yaml.safe_load(COMPOSE_MINIMAL.read_text())["services"]["router"]

    assert router["environment"]["WARMROUTE_ADMIN_HOST"] == "0.0.0.0"
    assert "127.0.0.1:${ADMIN_PORT_1:-8081}:8081" in router["ports"]
    assert dotenv()["ADMIN_PORT_1"] == str(config.AdminConfig().port)
    assert not config.AdminConfig().open


def test_secrets_are_made_once(tmp_path: Path) -> None:
    """Random, readable by the containers, in a directory that is not; and never made anew."""
    made = make_secrets(tmp_path / "one")
    before = {file.name: file.read_text() for file in made.iterdir()}
    make_secrets(made)
    other = {f.name: f.read_text() for f in make_secrets(tmp_path / "two").iterdir()}

    assert before == {file.name: file.read_text() for file in made.iterdir()}
    declared = {
        entry["file"].rpartition("/")[2]
        for entry in yaml.safe_load(COMPOSE_GPU.read_text())["secrets"].values()
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


UNITS = ("warmroute.service", "warmroute@.service")


@pytest.mark.parametrize("name", UNITS)
def test_the_systemd_units_keep_tokenizers(name: str) -> None:
    """In a cache directory: their users have no home, and the system is read-only."""
    lines = (DOCKER / "systemd" / name).read_text().splitlines()
    variables = dict(
        line.removeprefix("Environment=").split("=", 1)
        for line in lines
        if line.startswith("Environment=")
    )

    assert "CacheDirectory=warmroute" in lines
    assert Path(variables["HF_HOME"]).is_relative_to("/var/cache/warmroute")


def test_instances_of_the_template_unit_share_a_port_and_nothing_else() -> None:
    """Each has an admin port and a decision log of its own, and its options are ours."""
    unit = (DOCKER / "systemd" / "warmroute@.service").read_text()
    settings = dict(line.split("=", 1) for line in unit.splitlines() if "=" in line)
    options = [
        shlex.split(settings["ExecStart"].replace("%i", str(number)))[4:] for number in (1, 2)
    ]

    assert settings["User"] == "warmroute"
    assert "DynamicUser" not in settings
    assert (settings["Type"], settings["KillMode"]) == ("notify", "mixed")
    assert (settings["WatchdogSec"], settings["WatchdogSignal"]) == ("10", "SIGKILL")
    for number, words in enumerate(options, 1):
        assert words == [
            "--share-port",
            *("--admin-port", f"808{number}"),
            *("--decision-log", f"/var/lib/warmroute/decisions-{number}.jsonl"),
        ]
