"""The Kubernetes API, as far as EndpointSlices need it: one LIST, one watch.

Every failure of a server is a `DiscoveryError` with a bounded message, or `Expired`. The token is
read for each request: tokens that are bound to a pod rotate. It is sent to the configured address
alone, and no redirect is followed.
Source: the Kubernetes API concepts (efficient detection of changes).
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final, Literal

import aiohttp
import msgspec
from msgspec import Struct, field

from router.base.decoding import decoder
from router.base.errors import DiscoveryError
from router.base.host_names import Names
from router.config.tls import Tls, refusal
from router.discovery.endpoint_slices import SERVICE_LABEL, Slice
from router.upstream.session import Connector

ANSWER_S: Final = 15.0
_MAX_LIST_BYTES: Final = 32 * 1024 * 1024
_MAX_LINE_BYTES: Final = 4 * 1024 * 1024
_MAX_FILE_BYTES: Final = 1024 * 1024
_RULE: Final = (
    "its Role needs `list` and `watch` on endpointslices of discovery.k8s.io in namespace"
)


class Expired(Exception):
    """The watch is too far behind (410): list again."""


class _ListMetadata(Struct, frozen=True):
    version: str = field(name="resourceVersion", default="")


class _List(Struct, frozen=True):
    metadata: _ListMetadata
    items: tuple[Slice, ...] | None


class _Status(Struct, frozen=True):
    code: int | None = None


class _Event(Struct, frozen=True):
    type: Literal["ADDED", "MODIFIED", "DELETED", "BOOKMARK", "ERROR"]
    object: msgspec.Raw


class SliceChange(Struct, frozen=True):
    """A change of one slice."""

    part: Slice
    is_deleted: bool


_decode_list = decoder(_List, "json")
_decode_event = decoder(_Event, "json")
_decode_slice = decoder(Slice, "json")
_decode_status = decoder(_Status, "json")


class KubernetesApi:
    """Asks one API server about one Service; use as an async context manager, for a while only.

    Args:
        url: Its base URL.
        credentials: The folder with `token`, `ca.crt` and `namespace`.
        files: Where they are read.
        answer_s: For how long a whole list, and the first byte of a watch, are waited for.
    """

    def __init__(
        self, url: str, credentials: Path, files: Executor, *, answer_s: float = ANSWER_S
    ) -> None:
        self._names = Names()
        self._answer_s = answer_s
        self._url = url.rstrip("/")
        self._credentials = credentials
        self._files = files

    async def namespace(self) -> str:
        """Return the namespace of the router's own pod.

        Raises:
            DiscoveryError: the folder does not say it.
        """
        return (await self._read("namespace")).strip()

    async def list_slices(self, namespace: str, service: str) -> tuple[dict[str, Slice], str]:
        """List the slices of a Service by name, and the version to watch them from.

        Raises:
            DiscoveryError: no answer that can be used.
        """
        async with self._session() as session:
            async with self._get(session, namespace, service, {}) as response:
                body = await _whole(response, self._answer_s)
        try:
            found = _decode_list(body)
        except ValueError as exc:
            raise DiscoveryError(f"{self._url}: no list of EndpointSlices") from exc
        slices = {s.metadata.name: s for s in found.items or () if s.is_of(service)}
        return slices, found.metadata.version

    async def watch(
        self,
        namespace: str,
        service: str,
        version: str,
        *,
        for_s: float,
        opened: Callable[[], None],
        take: Callable[[list[SliceChange]], None],
    ) -> None:
        """Pass on changes in batches, as they come, until the server ends the watch.

        Returns also if the connection breaks, or is silent beyond the end.

        Args:
            for_s: How long the server is asked to keep the watch open.
            opened: Called once the server has accepted it.

        Raises:
            Expired: the version is too old.
            DiscoveryError: the server refuses, or sends something senseless.
        """
        query = {"watch": "1", "resourceVersion": version, "timeoutSeconds": str(round(for_s))}
        async with self._session() as session:
            async with self._get(session, namespace, service, query) as response:
                opened()
                try:
                    async with asyncio.timeout(for_s + self._answer_s):
                        await _follow(response, take)
                except (TimeoutError, aiohttp.ClientError, OSError):
                    return  # cut or silent: the next LIST shows what was missed

    @asynccontextmanager
    async def _get(
        self, session: aiohttp.ClientSession, namespace: str, service: str, query: dict[str, str]
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Open an answer.

        Raises:
            DiscoveryError: there is none, or it is a refusal.
        """
        url = f"{self._url}/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        token = (await self._read("token")).strip()
        if not token.isprintable():
            raise DiscoveryError(f"{self._credentials / 'token'}: not a token")
        request = session.get(
            url,
            params={"labelSelector": f"{SERVICE_LABEL}={service}", **query},
            headers={"Authorization": f"Bearer {token}", "Accept": "application/json"},
            allow_redirects=False,
        )
        try:
            async with asyncio.timeout(self._answer_s):
                response = await request
        except TimeoutError as exc:
            raise DiscoveryError(f"{self._url}: no answer in {self._answer_s:.0f} s") from exc
        except (aiohttp.ClientError, OSError, ValueError) as exc:
            reason = refusal(exc) or type(exc).__name__
            raise DiscoveryError(f"{self._url}: {reason}") from exc
        try:
            _check_status(response.status, self._url, namespace)
            yield response
        finally:
            response.close()

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Use new connections, and the authority that is on disk now."""
        tls: Tls | None = None
        if self._url.startswith("https://"):
            loop = asyncio.get_running_loop()
            load = partial(_tls, self._credentials / "ca.crt")
            tls = await loop.run_in_executor(self._files, Tls, {}, load)
        async with aiohttp.ClientSession(
            connector=Connector(self._names, tls=tls, server="Kubernetes"),
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"Accept-Encoding": "identity"},
            auto_decompress=False,  # a kilobyte may be a gigabyte
        ) as session:
            yield session

    async def _read(self, name: str) -> str:
        path = self._credentials / name
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._files, partial(_text, path))


def _check_status(status: int, url: str, namespace: str) -> None:
    """Refuse an answer that is an error.

    Raises:
        DiscoveryError: its status says so.
    """
    if status == 200:
        return
    if status == 401:
        raise DiscoveryError(f"{url} answered 401: the service account's token is not accepted")
    if status == 403:
        raise DiscoveryError(f"{url} answered 403: {_RULE} {namespace}")
    raise DiscoveryError(f"{url} answered {status}")


async def _whole(response: aiohttp.ClientResponse, answer_s: float) -> bytes:
    """Read an answer by a deadline, of a bounded size."""
    body = bytearray()
    try:
        async with asyncio.timeout(answer_s):
            async for chunk in response.content.iter_any():
                body += chunk
                if len(body) > _MAX_LIST_BYTES:
                    raise DiscoveryError(f"its list is larger than {_MAX_LIST_BYTES} bytes")
    except TimeoutError as exc:
        raise DiscoveryError("its list did not end in time") from exc
    except (aiohttp.ClientError, OSError) as exc:
        raise DiscoveryError(f"its list broke off ({type(exc).__name__})") from exc
    return bytes(body)


async def _follow(
    response: aiohttp.ClientResponse, take: Callable[[list[SliceChange]], None]
) -> None:
    """Pass on the changes of each chunk of lines."""
    rest = bytearray()
    async for chunk in response.content.iter_any():
        rest += chunk
        end = rest.rfind(b"\n") + 1
        if end:
            lines = bytes(rest[:end]).splitlines()
            del rest[:end]
            changes = [change for line in lines if line and (change := change_of(line))]
            if changes:
                take(changes)
        if len(rest) > _MAX_LINE_BYTES:
            raise DiscoveryError(f"an event of its watch is larger than {_MAX_LINE_BYTES} bytes")


def change_of(line: bytes) -> SliceChange | None:
    """Read a line of a watch; None: it changes nothing.

    Raises:
        Expired: the watch is too far behind.
        DiscoveryError: it is senseless, or an error.
    """
    try:
        event = _decode_event(line)
        if event.type == "BOOKMARK":
            return None
        if event.type == "ERROR":
            code = _decode_status(event.object).code
            if code == 410:
                raise Expired
            raise DiscoveryError(f"its watch ended with {code}")
        return SliceChange(_decode_slice(event.object), event.type == "DELETED")
    except ValueError as exc:
        raise DiscoveryError("its watch said what is no event of an EndpointSlice") from exc


def _text(path: Path) -> str:
    try:
        with path.open("rb") as stream:
            return stream.read(_MAX_FILE_BYTES).decode()
    except OSError as exc:
        raise DiscoveryError(f"{path}: {exc.strerror}") from exc
    except ValueError as exc:
        raise DiscoveryError(f"{path}: not text") from exc


def _tls(authority: Path) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=str(authority))
    except OSError as exc:  # an SSLError, too
        raise DiscoveryError(f"{authority}: {exc.strerror or 'not a certificate'}") from exc
