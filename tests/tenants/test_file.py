"""router.tenants.tenants: what is taken, and that each wrong thing is refused by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.base.errors import ConfigError
from router.tenants.tenants import TenantEntry, parse, read

SECRET = "s" * 32
DIGEST = "sha256:" + "0a" * 32
OTHER = "sha256:" + "0b" * 32


def file_of(entry: str, secret: str = f"secret: {SECRET}") -> bytes:
    return f"{secret}\ntenants:\n  - {entry}\n".encode()


def test_a_whole_file_is_read() -> None:
    """Every field there is."""
    made = parse(
        f"""
secret: {SECRET}
tenants:
  - name: research
    keys: ["{DIGEST}", "{OTHER}"]
    models: [tiny]
    max_in_flight: 64
    body_bytes: 8000000
    class: batch
    weight: 2.5
    priority: -1
    cache: group-1
  - name: plain
""".encode()
    )

    assert made.tenants[0] == TenantEntry(
        name="research",
        keys=(DIGEST, OTHER),
        models=("tiny",),
        max_in_flight=64,
        body_bytes=8_000_000,
        service_class="batch",
        weight=2.5,
        priority=-1,
        cache="group-1",
    )
    assert made.tenants[1] == TenantEntry(name="plain")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "top level must be a mapping"),
        (b"[]", "top level must be a mapping"),
        (b"tenants: []", "tenants: name 1 to 1000"),
        (b"tenants: {a: {}}", "tenants: must be a list, not a mapping"),
        (b"\xff", "not YAML"),
        (b"a: [", "not YAML"),
        (b"a: 2001-99-99", "not YAML"),
        (b"[" * 5000, "not YAML"),
        (file_of("{name: a, limit: 5}"), "unknown key 'tenants[0].limit'"),
        (file_of("{name: a, model: [x]}"), "did you mean 'models'"),
        (file_of("{name: a, name: b}"), "given twice"),
        (file_of("{name: a, 5: b}"), "must be text"),
        (file_of("{keys: []}"), "name is missing"),
        (file_of("{name: 'a b'}"), "tenants[0].name: 1 to 64 letters"),
        (file_of("{name: ''}"), "tenants[0].name"),
        (file_of("{name: a}\n  - {name: a}"), "tenants[1].name: is tenants[0].name, too"),
        (file_of("{name: a, keys: [abc]}"), "tenants[0].keys[0]: must be sha256:"),
        (
            file_of(f"{{name: a, keys: ['{DIGEST}']}}\n  - {{name: b, keys: ['{DIGEST}']}}"),
            "tenants[1].keys[0]: is tenants[0].keys[0], too",
        ),
        (file_of("{name: a, models: []}"), "tenants[0].models: name at least one"),
        (
            file_of("{name: a, requests_per_minute: 600}"),
            r"tenants[0].requests_per_minute was removed: limit rates in the gateway in front",
        ),
        (file_of("{name: a, max_in_flight: 0}"), "max_in_flight: must be at least 1"),
        (file_of("{name: a, max_in_flight: 1.5}"), "must be a"),
        (file_of("{name: a, max_in_flight: '5'}"), "must be a"),
        (file_of("{name: a, body_bytes: 0}"), "at least 1"),
        (file_of("{name: a, weight: 0}"), "more than 0"),
        (file_of("{name: a, weight: .nan}"), "weight"),
        (file_of("{name: a, weight: .inf}"), "at most 1000"),
        (file_of("{name: a, priority: 5000}"), "at most 1000"),
        (file_of("{name: a, cache: 'x y'}"), "tenants[0].cache: own, shared, or the name"),
        (file_of("{name: a, salt: short}"), "tenants[0].salt: 22 to 128"),
        (file_of(f"{{name: a, salt: '{'x' * 21}/'}}"), "tenants[0].salt"),
        (file_of(f"{{name: a, salt: {'x' * 22}, cache: shared}}"), "is for cache: own alone"),
        (
            file_of(f"{{name: a, salt: {'x' * 22}}}\n  - {{name: b, salt: {'x' * 22}}}"),
            "tenants[1].salt: is tenants[0].salt, too",
        ),
        (file_of("{name: a}", secret=""), "secret: is needed for tenants[0].cache: own"),
        (file_of("{name: a, cache: g}", secret=""), "secret: is needed"),
        (file_of("{name: a}", secret="secret: short"), "secret: needs at least 32"),
    ],
)
def test_what_is_wrong_is_named(data: bytes, says: str) -> None:
    """The field, and what is allowed there."""
    with pytest.raises(ConfigError) as failed:
        parse(data)

    assert says in failed.value.message


def test_no_message_quotes_what_is_secret() -> None:
    """A key where its digest belongs, a salt that will not do, a secret of the wrong type."""
    for data in (
        file_of("{name: a, keys: [wr-geheim]}"),
        file_of("{name: a, salt: geheim/geheim/geheim/geheim}"),
        file_of("{name: a}", secret="secret: geheim"),
        file_of("{name: a}", secret="secret: [geheim]"),
        b"secret: 'geheim' 'geheim'\ntenants: []",
        b"secret: *geheim\ntenants: []",
    ):
        with pytest.raises(ConfigError) as failed:
            parse(data)
        assert "geheim" not in failed.value.message


def test_more_tenants_than_allowed_are_refused() -> None:
    """1,000 are taken."""
    entries = "".join(f"\n  - name: t{i}" for i in range(1000))
    data = f"secret: {SECRET}\ntenants:{entries}"

    assert len(parse(data.encode()).tenants) == 1000
    with pytest.raises(ConfigError, match="1 to 1000"):
        parse(f"{data}\n  - name: more".encode())


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    """With the reason."""
    with pytest.raises(ConfigError, match="No such file"):
        read(tmp_path / "none.yaml")
