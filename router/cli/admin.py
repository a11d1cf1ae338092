"""Asking the admin port of a running router, and the token that it wants."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
from click.core import ParameterSource

from router.config import ADMIN_TOKEN, ADMIN_TOKEN_FILE, ADMIN_URL
from router.config.hosts import HostRules
from router.config.tls import system_tls
from router.http.admin_token import default_file

if TYPE_CHECKING:
    import httpx

SILENT_S: Final = 10.0
"""A stream that has a line each second, and none for so long, is over."""


class NoRouter(click.ClickException):
    """No router answers at the admin port's address."""


class Refused(click.ClickException):
    """The router refuses; the message is its own."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Admin(NamedTuple):
    """The admin port that a command asks, and how it shows the answer."""

    url: str
    token_file: Path | None  # None: the variable's token, else the user's own file
    as_json: bool

    def ask(self, method: str, path: str, order: Any = None, *, timeout_s: float = 30.0) -> Any:
        """Ask a running router; an order that is not bytes is sent as JSON.

        Raises:
            NoRouter, Refused: it is not there, or refuses; the message says why.
        """
        import httpx  # late: `--help` should not import an HTTP stack

        is_encoded = order is None or isinstance(order, bytes)
        content = order if is_encoded else json.dumps(order, default=str).encode()
        with self._asking():
            answer = httpx.request(
                method,
                self._address(path),
                content=content,
                headers=self._headers(),
                timeout=timeout_s,
                trust_env=False,  # a proxy would get the admin token
                verify=system_tls(),
            )
            if not answer.is_success:
                raise self._refused(answer)
            return answer.json()

    def lines(self, path: str) -> Iterator[Any]:
        """Yield the JSON lines of a stream until it ends.

        Raises:
            NoRouter, Refused: as `ask`; also when the router goes away or is silent.
        """
        import httpx  # late, as in `ask`

        timeout = httpx.Timeout(30.0, read=SILENT_S)
        with self._asking():
            address, headers = self._address(path), self._headers()
            with httpx.stream(
                "GET",
                address,
                headers=headers,
                timeout=timeout,
                trust_env=False,
                verify=system_tls(),
            ) as answer:
                if not answer.is_success:
                    answer.read()
                    raise self._refused(answer)
                yield from map(json.loads, answer.iter_lines())

    @contextmanager
    def _asking(self) -> Iterator[None]:
        import httpx  # late, as in `ask`

        try:
            yield
        except OSError as exc:
            raise click.ClickException(f"{exc.filename}: {exc.strerror}") from exc
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise NoRouter(
                f"{self.url}: {exc}; is `warmroute serve` running, with this admin port?"
            ) from exc
        except (ValueError, KeyError, TypeError) as exc:
            raise NoRouter(f"{self.url}: not the admin port of `warmroute serve`") from exc

    def _address(self, path: str) -> str:
        return f"{self.url.rstrip('/')}/admin/{path}"

    def _headers(self) -> dict[str, str]:
        token = self.token()
        bearer = {"Authorization": f"Bearer {token}"} if token is not None else {}
        return {"Content-Type": "application/json"} | bearer

    def _refused(self, answer: httpx.Response) -> click.ClickException:
        """Return what a router says that refuses.

        Raises:
            ValueError, KeyError, TypeError: it is no router.
        """
        error = answer.json()["error"]
        message = str(error["message"])
        if answer.status_code == HTTPStatus.UNAUTHORIZED and "admin token" in message:
            return Refused(self._token_is_wrong(), answer.status_code)
        if answer.status_code == HTTPStatus.NOT_FOUND and "is not served here" in message:
            return NoRouter(
                f"{self.url} is the public port of a router; --admin needs its admin port, which "
                "`warmroute serve` prints when it starts (8081 unless it is set)"
            )
        return Refused(message, answer.status_code)

    def _token_is_wrong(self) -> str:
        """Explain where the token came from that the router refuses, and how to give another."""
        how = f"give the router's own with --token-file FILE, or set {ADMIN_TOKEN}"
        variable, file = self.given_by()
        if variable is not None:
            return f"the admin token is wrong: it came from the variable {ADMIN_TOKEN}; {how}"
        if file is None:
            return f"the admin token is missing: there is no {default_file(os.environ)}; {how}"
        return f"the admin token is wrong: it came from the file {file}; {how}"

    def given_by(self) -> tuple[str | None, Path | None]:
        """Return the variable's token or the file with the token; None: there is none."""
        given = os.environ.get(ADMIN_TOKEN)
        if self.token_file is None and given:
            return given.strip(), None
        return None, self.token_file or _own_token(self.url)

    def token(self) -> str | None:
        """Read the token: of --token-file, of the variable, or of a router that runs here.

        Raises:
            OSError: the file cannot be read.
        """
        given, file = self.given_by()
        return file.read_text().strip() if file is not None else given


def admin_options(command: Any) -> Any:
    """Add the options to ask an admin port to a command, as its argument `admin`."""

    @wraps(command)
    def with_admin(
        *args: Any, admin: str, token_file: Path | None, as_json: bool, **options: Any
    ) -> Any:
        return command(*args, admin=Admin(admin, token_file, as_json), **options)

    decorated = click.option("--json", "as_json", is_flag=True, help="Print the raw answer.")(
        with_admin
    )
    decorated = click.option(
        "--token-file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        envvar=ADMIN_TOKEN_FILE,
        callback=_existing,
        help=f"File with the admin token; or set {ADMIN_TOKEN_FILE}, or the token itself as "
        f"{ADMIN_TOKEN}. Default: the file that `warmroute serve` made for you on this machine.",
    )(decorated)
    return click.option(
        "--admin",
        default="http://127.0.0.1:8081",
        show_default=True,
        metavar="URL",
        envvar=ADMIN_URL,
        callback=_with_scheme,
        help=f"Admin URL of the router; or set {ADMIN_URL}.",
    )(decorated)


def _with_scheme(_: click.Context, __: click.Parameter, url: str) -> str:
    """Take an address without a scheme as http."""
    return url if "://" in url else f"http://{url}"


def _existing(ctx: click.Context, param: click.Parameter, file: Path | None) -> Path | None:
    """Refuse a file that does not exist, with the flag or the variable that named it."""
    if file is not None and not file.exists():
        is_variable = ctx.get_parameter_source(param.name or "") is ParameterSource.ENVIRONMENT
        named = ADMIN_TOKEN_FILE if is_variable else "--token-file"
        raise click.BadParameter(f"{str(file)!r} does not exist", ctx, param, f"'{named}'")
    return file


def _own_token(admin: str) -> Path | None:
    """Find the token that `serve` created for this user; it is sent to this machine alone."""
    try:
        is_here = HostRules(["loopback", "localhost"]).refused([admin]) is None
    except ValueError:  # not a URL: reported when it is asked
        return None
    file = default_file(os.environ)
    return file if is_here and file.exists() else None


def echo_json(fields: Any, *, indent: int | None = 2) -> None:
    """Print an answer as it came."""
    click.echo(json.dumps(fields, indent=indent))


@click.command("admin-token")
def admin_token() -> None:
    """Print your admin token, for curl."""
    file = default_file(os.environ)
    try:
        click.echo(file.read_text().strip())
    except OSError as exc:
        raise click.ClickException(
            f"{file}: {exc.strerror}; `warmroute serve` without admin.token_file makes it"
        ) from exc
