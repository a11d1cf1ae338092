"""`warmroute tenant-key`: a key that is shown once, and an entry that lets it in.

router.tenants.tenants: what is made, and what is found.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from multidict import CIMultiDict

from router.base.errors import ConfigError
from router.cli import main
from router.tenants import Tenants
from router.tenants.tenants import DIGEST, add, digest_of, key_in, make, new_key, written


def whose(path: Path, key: str) -> str:
    tenants = Tenants(path)
    return tenants.authenticate(CIMultiDict({"x-api-key": key})).name


def test_keys_are_added_to_a_file_that_keeps_what_it_has(tmp_path: Path) -> None:
    """Made at first, for its owner's eyes only; then comments, order and mode stay."""
    path = tmp_path / "tenants.yaml"
    one = add(path, "one")
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_text(path.read_text() + "    # what a tenant\n    max_in_flight: 5")
    path.chmod(0o640)
    before = path.read_text()
    two = add(path, "two")

    assert path.read_text().startswith(before)
    assert path.stat().st_mode & 0o777 == 0o640
    assert [whose(path, key) for key in (one, two)] == ["one", "two"]
    assert not any(key in path.read_text() for key in (one, two))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tenants: [{name: x, cache: shared}]\n", "block style"),
        ("tenants:\n- name: x\n  cache: shared\n", "block style"),
        (
            "tenants:\n  - {name: x}\nsecret: 0123456789abcdef0123456789abcdef\n",
            "block style",
        ),
        ("tenants:\n  - {name: one, cache: shared}\n", "there already"),
        ("tenants: [\n", "not YAML"),
    ],
)
def test_a_file_that_cannot_be_added_to_stays_as_it_is(
    tmp_path: Path, text: str, says: str
) -> None:
    """And it is said what to do."""
    path = tmp_path / "tenants.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError, match=says):
        add(path, "one")
    assert path.read_text() == text


def test_the_command_shows_key_and_entry(tmp_path: Path) -> None:
    """The key alone on standard output, for a pipe; a wrong name is refused with the rule."""
    runner = CliRunner()
    shown = runner.invoke(main, ["tenant-key", "one"])
    assert shown.exit_code == 0
    assert shown.stdout.startswith("wr-")
    assert len(shown.stdout.split()) == 1
    assert "sha256:" in shown.stderr

    path = tmp_path / "tenants.yaml"
    added = runner.invoke(main, ["tenant-key", "one", "--file", str(path)])
    assert whose(path, added.stdout.strip()) == "one"
    again = runner.invoke(main, ["tenant-key", "one", "--file", str(path)])
    assert (again.exit_code, again.stdout) == (2, "")
    wrong = runner.invoke(main, ["tenant-key", "a b"])
    assert wrong.exit_code == 2
    assert "a tenant's name has 1 to 64 letters" in wrong.stderr


def test_an_entry_is_for_the_file() -> None:
    """As it is printed."""
    key, entry = make("one")

    assert key not in entry
    assert entry.startswith("  - name: one\n    keys:\n      - sha256:")


def test_a_key_has_256_random_bits() -> None:
    """Two are never equal; the digest is written as the file wants it."""
    keys = {new_key() for _ in range(100)}

    assert len(keys) == 100
    assert all(len(key) == len("wr-") + 43 for key in keys)
    assert DIGEST.fullmatch(written(digest_of(keys.pop())))


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({"Authorization": "Bearer abc"}, "abc"),
        ({"Authorization": "bearer  abc "}, "abc"),
        ({"X-API-Key": "abc"}, "abc"),
        ({"Authorization": "Basic abc", "x-api-key": "def"}, "def"),
        ({"Authorization": "Bearer ", "x-api-key": "def"}, "def"),
        ({"Authorization": "abc"}, None),
        ({"Authorization": "Bearer " + "x" * 513}, None),
        ({}, None),
    ],
)
def test_where_a_key_is_found(headers: dict[str, str], key: str | None) -> None:
    """A bearer token first, then Anthropic's header; nothing else is a key."""
    assert key_in(CIMultiDict(headers)) == key


def test_odd_bytes_in_a_key_are_digested() -> None:
    """aiohttp hands them out as lone surrogates; nothing breaks."""
    assert len(digest_of("\udcff\udc80")) == 32
