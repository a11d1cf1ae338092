"""What is refused of `--workers`, and what a worker makes of the configuration."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from router import config
from router.base.errors import ConfigError
from router.config.worker import Worker, of_socket, unpacked
from tests.cli.running import REPLICA, run

WORKER = Worker(
    number=2,
    total=3,
    start=14,
    is_again=True,
    folder=Path("/tmp/some where"),
    port=8080,
    admin_port=8081,
    redis_url="unix:///tmp/redis?db=0",
)


@pytest.mark.parametrize(
    ("number", "why"),
    [
        ("0", "must be at least 1"),
        ("-2", "must be at least 1"),
        ("1000", "at most"),
        ("two", "not a valid integer"),
        ("1.5", "not a valid integer"),
    ],
)
def test_a_number_of_workers_that_makes_no_sense_is_refused(number: str, why: str) -> None:
    result = run("serve", *REPLICA, "--workers", number)

    assert result.exit_code == 2
    assert "--workers" in result.output
    assert why in result.output


def test_the_most_workers_depend_on_the_cores() -> None:
    most = 4 * len(os.sched_getaffinity(0))

    assert config.load(flags={("listen", "workers"): most}).listen.workers == most
    with pytest.raises(ConfigError, match=rf"listen.workers: {most + 1} are too many") as caught:
        config.load(flags={("listen", "workers"): most + 1})
    assert caught.value.param == "listen.workers"


def test_several_workers_need_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    with pytest.raises(ConfigError, match="needs Linux"):
        config.load(flags={("listen", "workers"): 2})


def test_without_a_redis_server_it_is_said_what_to_install() -> None:
    result = run("serve", *REPLICA, "--workers", "2", "--admin-open", PATH="/nowhere")

    assert result.exit_code == 2
    assert "install redis-server or valkey-server, or set redis.url (--redis)" in result.output


def test_a_worker_is_an_argument_and_its_socket_names_it() -> None:
    assert unpacked(WORKER.packed()) == WORKER
    assert of_socket(WORKER.socket) == (14, 2)
    for name in ("redis", "redis.log", "1.sock", "a-b.sock"):
        assert of_socket(Path(name)) is None


def test_a_private_redis_needs_nothing_of_the_configured_one(tmp_path: Path) -> None:
    """A user, a password or a certificate that is set is for a Redis elsewhere."""
    flags = {
        ("redis", "username"): "warmroute",
        ("redis", "password_file"): str(tmp_path / "password"),
        ("redis", "namespace"): "fleet",
        ("listen", "port"): 0,
    }
    applied = WORKER.applied(config.load(flags=flags))

    assert applied.redis.url == WORKER.redis_url
    assert applied.redis.username is applied.redis.password_file is None
    assert applied.redis.namespace == "fleet"
    assert (applied.listen.port, applied.admin.port) == (8080, 8081)
