"""router.tenants.tenants: keys to tenants, and the file that is read again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from multidict import CIMultiDict

from router.base.errors import ConfigError, Unauthorized
from router.tenants import Tenants
from router.tenants.tenants import MAX_LABELS, OTHER, digest_of, new_key, written

SECRET = "s" * 32
KEYS = {name: new_key() for name in ("a", "b", "c")}


def write(path: Path, *entries: str) -> None:
    """Replace the file as an operator should: whole."""
    new = path.with_suffix(".new")
    new.write_text(f"secret: {SECRET}\ntenants:\n" + "".join(f"  - {e}\n" for e in entries))
    os.replace(new, path)


def entry(name: str, *, key: str | None = None, more: str = "") -> str:
    return f"{{name: {name}, keys: ['{written(digest_of(key or KEYS[name]))}']{more}}}"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "tenants.yaml"
    write(made, entry("a"), entry("b"), entry("c", more=", cache: shared"))
    return made


def bearer(key: str) -> CIMultiDict[str]:
    return CIMultiDict({"Authorization": f"Bearer {key}"})


def look(tenants: Tenants, times: int = 2) -> None:
    for _ in range(times):
        tenants.follow(tenants.look())


def test_a_key_is_one_tenants(path: Path) -> None:
    """Each its own; no key and a wrong one are refused, and not quoted."""
    tenants = Tenants(path)

    assert [tenants.authenticate(bearer(key)).name for key in KEYS.values()] == ["a", "b", "c"]
    assert tenants.authenticate(CIMultiDict({"x-api-key": KEYS["a"]})).name == "a"
    for headers in (bearer("wr-wrong"), bearer(written(digest_of(KEYS["a"]))), CIMultiDict()):
        with pytest.raises(Unauthorized) as refused:
            tenants.authenticate(headers)
        assert "wr-wrong" not in refused.value.message


def test_salts_keep_tenants_apart(path: Path) -> None:
    """By default each has its own; who shares has none, unless its client sends one.

    That one is hashed, too: another tenant's salt, should it be known, is of no use.
    """
    tenants = Tenants(path)
    a, b, c = (tenants.authenticate(bearer(key)) for key in KEYS.values())

    assert a.salted(None) not in (None, b.salted(None))
    assert a.salted(None) not in repr(a)
    assert a.salted("user 1") not in (a.salted(None), a.salted("user 2"), b.salted("user 1"))
    assert c.salted(None) is None
    assert c.salted(a.salted(None)) not in (None, a.salted(None))


def test_a_group_shares_a_salt(path: Path) -> None:
    """Only its members; a tenant of the group's name is none."""
    write(path, entry("a", more=", cache: b"), entry("c", more=", cache: b"), entry("b"))
    tenants = Tenants(path)
    a, b, c = (tenants.authenticate(bearer(key)) for key in KEYS.values())

    assert a.salted(None) == c.salted(None) != b.salted(None)


def test_a_changed_file_is_read_once_it_is_quiet(path: Path) -> None:
    """A key that is gone is refused, a new one taken."""
    tenants = Tenants(path)
    key = new_key()
    write(path, entry("a", key=key), entry("b"))
    look(tenants, times=1)
    assert tenants.authenticate(bearer(KEYS["a"])).name == "a"
    look(tenants, times=1)

    assert tenants.authenticate(bearer(key)).name == "a"
    for gone in ("a", "c"):
        with pytest.raises(Unauthorized):
            tenants.authenticate(bearer(KEYS[gone]))


def test_a_bad_file_changes_nothing_and_is_counted_once(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Broken, empty or gone: the last good one stays, until there is a good one again."""
    results: list[str] = []
    tenants = Tenants(path, on_reload=results.append)
    for text in ("tenants: [", "", "tenants: [{name: a, keys: [secret-key]}]"):
        path.write_text(text)
        look(tenants, times=5)
        assert tenants.authenticate(bearer(KEYS["a"])).name == "a"
    path.unlink()
    look(tenants, times=5)
    assert tenants.authenticate(bearer(KEYS["a"])).name == "a"
    write(path, entry("b"))
    look(tenants)

    assert results == ["bad", "bad", "bad", "bad", "ok"]
    assert tenants.named("a") is None
    assert "secret-key" not in caplog.text
    assert "is invalid" in caplog.text


def test_a_bad_file_at_the_start_is_refused(path: Path) -> None:
    """There is no last good one."""
    path.write_text("tenants: [")

    with pytest.raises(ConfigError, match=r"tenants\.yaml"):
        Tenants(path)


def test_labels_are_bounded_whatever_files_come(path: Path) -> None:
    """The first hundred names have their own, for the life of the process."""
    tenants = Tenants(path)
    labels = set()
    for version in range(5):
        write(path, entry("a"), *(f"{{name: t{version}-{i}}}" for i in range(60)))
        look(tenants)
        labels |= {tenant.label for tenant in map(tenants.named, tenants.names) if tenant}
        assert tenants.authenticate(bearer(KEYS["a"])).label == "a"

    assert OTHER in labels
    assert len(labels) <= MAX_LABELS + 1


def test_models_are_a_tenants_own(path: Path) -> None:
    """All where none are named; a model that cannot be seen only then."""
    write(path, entry("a", more=", models: [tiny]"), entry("b"))
    tenants = Tenants(path)
    a, b = (tenants.authenticate(bearer(KEYS[name])) for name in "ab")

    assert [a.may_use(model) for model in ("tiny", "large", None)] == [True, False, False]
    assert all(b.may_use(model) for model in ("tiny", "large", None))
