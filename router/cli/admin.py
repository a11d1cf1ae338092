"""Asking the admin port of a running router, and the token that it wants."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from router.config import ADMIN_TOKEN, ADMIN_URL
from router.config.hosts import HostRules
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
            )
            if not answer.is_success:
                raise _refused(answer)
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
            with httpx.stream("GET", address, headers=headers, timeout=timeout) as answer:
                if not answer.is_success:
                    answer.read()
                    raise _refused(answer)
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

    def token(self) -> str | None:
        """Read the token: of --token-file, of the variable, or of a router that runs here.

        Raises:
            OSError: the file cannot be read.
        """
        given = os.environ.get(ADMIN_TOKEN)
        if self.token_file is None and given:
            return given.strip()
        file = self.token_file or _own_token(self.url)
        return file.read_text().strip() if file is not None else None


def _refused(answer: httpx.Response) -> Refused:
    """Return what a router says that refuses.

    Raises:
        ValueError, KeyError, TypeError: it is no router.
    """
    return Refused(str(answer.json()["error"]["message"]), answer.status_code)


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
        type=click.Path(path_type=Path, exists=True),
        metavar="FILE",
        envvar="WARMROUTE_ADMIN_TOKEN_FILE",
        help=f"File with the admin token; or set {ADMIN_TOKEN}. Default: the file that "
        "`warmroute serve` made for you on this machine.",
    )(decorated)
    return click.option(
        "--admin",
        default="http://127.0.0.1:8081",
        show_default=True,
        metavar="URL",
        envvar=ADMIN_URL,
        help=f"Admin URL of the router; or set {ADMIN_URL}.",
    )(decorated)


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
            f"{file}: {exc.strerror}; `warmroute serve` without --admin-token-file makes it"
        ) from exc
