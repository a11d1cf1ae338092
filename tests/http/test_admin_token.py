"""router.http.admin_token: the token that a router makes when it is given none."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from router import config
from router.base.errors import ConfigError
from router.cli import main
from router.http.admin_token import default_file, with_token

REPLICA = {("replicas",): ["http://127.0.0.1:9"]}


def environ(directory: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(directory), "HOME": "/nowhere"}


def test_a_token_is_made_once_for_its_user_alone(tmp_path: Path) -> None:
    """Mode 0600, long, and the same at the next start."""
    made = with_token(config.load(flags=REPLICA), environ(tmp_path)).admin.token_file
    assert made is not None
    token = made.read_text()
    again = with_token(config.load(flags=REPLICA), environ(tmp_path)).admin.token_file

    assert made == again == tmp_path / "warmroute" / "admin-token"
    assert len(token.strip()) >= 43
    assert again.read_text() == token
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    assert stat.S_IMODE(made.parent.stat().st_mode) == 0o700
    assert [file.name for file in made.parent.iterdir()] == ["admin-token"]


def test_routers_that_start_at_once_have_one_token(tmp_path: Path) -> None:
    """No process reads half of one, and none replaces another's."""

    def start(_: int) -> str:
        file = with_token(config.load(flags=REPLICA), environ(tmp_path)).admin.token_file
        assert file is not None
        return file.read_text()

    with ThreadPoolExecutor(8) as pool:
        tokens = set(pool.map(start, range(32)))

    assert len(tokens) == 1
    assert len(tokens.pop()) > 40


@pytest.mark.parametrize("key", ["open", "token_file"])
def test_a_named_token_is_not_generated(tmp_path: Path, key: str) -> None:
    """A file of one's own, or none at all on loopback."""
    value: object = True if key == "open" else str(tmp_path / "mine")
    loaded = config.load(flags=REPLICA | {("admin", key): value})

    assert with_token(loaded, environ(tmp_path)) == loaded
    assert not (tmp_path / "warmroute").exists()


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """The message says what to do."""
    file = default_file(environ(tmp_path))
    file.parent.mkdir()
    file.write_text("t\n")
    file.chmod(0o644)

    with pytest.raises(ConfigError, match=r"other users can read .*chmod 600"):
        with_token(config.load(flags=REPLICA), environ(tmp_path))


def test_where_no_token_can_be_kept_the_start_is_refused(tmp_path: Path) -> None:
    """Rather than an admin port that is open, or one that cannot be used."""
    (tmp_path / "state").write_text("a file")

    with pytest.raises(ConfigError, match=r"\(admin\.token_file\)"):
        with_token(config.load(flags=REPLICA), environ(tmp_path / "state"))


def test_the_token_can_be_printed(tmp_path: Path) -> None:
    """For curl; where there is none, the message says who makes it."""
    runner = CliRunner()
    missing = runner.invoke(main, ["admin-token"], env=environ(tmp_path))
    file = with_token(config.load(flags=REPLICA), environ(tmp_path)).admin.token_file
    printed = runner.invoke(main, ["admin-token"], env=environ(tmp_path))

    assert file is not None
    assert printed.stdout == file.read_text()
    assert missing.exit_code == 1
    assert "`warmroute serve`" in missing.stderr
