"""A Kubernetes API server for tests: EndpointSlices, their LIST and watch, and what may go wrong.

Written from the API's documentation: LIST, watch lines with ADDED,
MODIFIED, DELETED, BOOKMARK and ERROR, 401 without the token, 403 without the Role.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

from aiohttp import web

from tests.http.certificates import Authority

Json = dict[str, Any]
SERVICE = "vllm"


def endpoint(address: str, pod: str | None = None, **conditions: bool) -> Json:
    made: Json = {"addresses": [address], "conditions": conditions}
    if pod is not None:
        made["targetRef"] = {"kind": "Pod", "namespace": "prod", "name": pod, "uid": f"u-{pod}"}
    return made


def slice_of(*endpoints: Json, name: str = "vllm-a", **fields: Any) -> Json:
    labels = {"kubernetes.io/service-name": SERVICE} | fields.pop("labels", {})
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "namespace": "prod", "resourceVersion": "7", "labels": labels},
        "addressType": "IPv4",
        "endpoints": list(endpoints) or None,
        "ports": [{"name": "http", "port": 8000, "protocol": "TCP"}],
    } | fields


class FakeKubernetes:
    """One namespace, `prod`, of one API server; attributes say how it behaves."""

    def __init__(self, folder: Path) -> None:
        self.credentials = folder
        self.url = ""
        self.slices: dict[str, Json] = {}
        self.token = ""
        self.status = 200
        self.watch_status = 200
        self.list_body: bytes | None = None  # instead of the list
        self.list_end: Literal["never", "cut"] | None = None  # how a list ends that is begun
        self.is_silent = False
        self.num_lists = 0
        self.queries: list[dict[str, str]] = []  # of watches
        self._watches: set[asyncio.Queue[bytes | None]] = set()
        self.rotate("token-1")
        (folder / "namespace").write_text("prod")

    def rotate(self, token: str) -> None:
        """Accept another token only, and put it where the kubelet would."""
        self.token = token
        (self.credentials / "token").write_text(token)

    # -- what happens in the cluster ---------------------------------------------------------

    def set(self, *slices: Json, silently: bool = False) -> None:
        """Have these slices; watches learn of it unless their events are lost."""
        old, self.slices = self.slices, {each["metadata"]["name"]: each for each in slices}
        if silently:
            return
        for name, each in self.slices.items():
            if old.get(name) != each:
                self.send("MODIFIED" if name in old else "ADDED", each)
        for name in old.keys() - self.slices.keys():
            self.send("DELETED", old[name])

    def send(self, kind: str, what: Json) -> None:
        self.write(json.dumps({"type": kind, "object": what}).encode() + b"\n")

    def write(self, data: bytes | None) -> None:
        """Write to all watches; None: end them."""
        for queue in self._watches:
            queue.put_nowait(data)

    @property
    def num_watches(self) -> int:
        return len(self._watches)

    # -- what clients see --------------------------------------------------------------------

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Answer a LIST or a watch."""
        is_watch = request.query.get("watch") == "1"
        self.num_lists += not is_watch
        if self.is_silent:
            await asyncio.Event().wait()
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return _status(401)
        status = self.watch_status if is_watch else self.status
        if status != 200:
            return _status(status)
        assert request.query["labelSelector"] == f"kubernetes.io/service-name={SERVICE}"
        if is_watch:
            return await self._watch(request)
        return await self._begin(request) if self.list_end is not None else self._list()

    def _list(self) -> web.Response:
        if self.list_body is not None:
            return web.Response(body=self.list_body)
        found = {"kind": "EndpointSliceList", "metadata": {"resourceVersion": "42"}}
        return web.json_response(found | {"items": list(self.slices.values())})

    async def _begin(self, request: web.Request) -> web.StreamResponse:
        """Begin a list that does not come to its end."""
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b'{"items": [')
        if self.list_end == "never":
            await asyncio.Event().wait()
        assert request.transport is not None
        request.transport.abort()
        return response

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.queries.append(dict(request.query))
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._watches.add(queue)
        try:
            while (data := await queue.get()) is not None:
                await response.write(data)
        finally:
            self._watches.discard(queue)
        return response


def _status(code: int) -> web.Response:
    return web.json_response({"kind": "Status", "status": "Failure", "code": code}, status=code)


@asynccontextmanager
async def kubernetes(folder: Path, *, names: str = "IP:127.0.0.1") -> AsyncIterator[FakeKubernetes]:
    """Run one with TLS, of an authority that clients find in `ca.crt`."""
    fake = FakeKubernetes(folder)
    authority = Authority(folder)
    (folder / "ca.crt").write_bytes(authority.cert.read_bytes())
    app = web.Application()
    path = "/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices"
    app.router.add_get(path, fake.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
    await runner.setup()
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(*authority.issue("api", names=names))
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
    await site.start()
    fake.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield fake
    finally:
        fake.write(None)
        await runner.cleanup()
