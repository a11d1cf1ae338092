"""The reference pages that are written by hand list everything that the code has."""

from __future__ import annotations

import re
from collections.abc import Iterator

import click

from router.api import routes
from router.base import errors
from router.cli import main
from router.cli.group import GROUPS
from tests.docs_blocks import ROOT

REFERENCE = ROOT / "docs/reference"
# They never reach a client: the side paths are counted and logged, the command line prints.
INTERNAL = (errors.StoreError, errors.PoolError, errors.DiscoveryError, errors.ConfigError)


def answered(base: type[errors.RouterError]) -> Iterator[type[errors.RouterError]]:
    """Yield the errors that may be an answer, of those that have a code of their own."""
    if issubclass(base, INTERNAL):
        return
    if "code" in base.__dict__:
        yield base
    for kind in base.__subclasses__():
        yield from answered(kind)


def test_every_error_code_is_explained() -> None:
    """The page lists each code with its status, and no other."""
    page = (REFERENCE / "errors.md").read_text()
    kinds = {*answered(errors.RouterError)} - {errors.AdminRefused}  # whose status varies

    listed = set(re.findall(r"(\d{3}) `(\w+)`", page)) - {("415", errors.AdminRefused.code)}

    assert listed == {(str(kind.status), kind.code) for kind in kinds}
    assert f"`{errors.AdminRefused.code}`" in page


def test_every_admin_route_is_listed() -> None:
    """The page lists each route of the admin port."""
    page = (REFERENCE / "admin.md").read_text()
    files = [ROOT / "router/http/admin.py", *ROOT.glob("router/observers/*/*.py")]
    source = "".join(file.read_text() for file in files)
    routes = re.findall(r'"(GET|POST|DELETE) (/admin/\w+)(/\{[^}]+\})?(/\w+)?"', source)

    assert len(routes) >= 10
    for method, path, name, order in routes:
        row = rf"\| `{method} {path}{'/[A-Z]+' if name else ''}{order}`"
        assert re.search(row, page), f"{method} {path}{name}{order}"


def test_every_response_header_is_listed() -> None:
    """The page lists each header that the router adds to an answer."""
    page = (REFERENCE / "records.md").read_text()
    source = (ROOT / "router/request/send.py").read_text()
    headers = set(re.findall(r'"(x-warmroute-[a-z-]+)"', source))

    assert len(headers) >= 8
    for header in headers:
        assert f"`{header}`" in page, header


def test_every_served_route_is_listed() -> None:
    """The page lists each route of the public port; routes that only render are a group."""
    page = (REFERENCE / "apis.md").read_text()
    listed = set(re.findall(r"`(/[\w/]+)`", page))

    rendering = {path for path in routes.KNOWN if path.endswith("/render")}

    assert set(routes.KNOWN) - rendering <= listed
    assert len(rendering) == 5


def test_every_command_is_in_a_group() -> None:
    """The generated list leaves no command out."""
    named = {name for names in GROUPS.values() for name in names}

    assert set(main.list_commands(click.Context(main))) <= named
