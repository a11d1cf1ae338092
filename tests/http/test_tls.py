"""TLS: to clients, with renewal and client certificates; to replicas, and what is wrong there."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from router.base.errors import ConfigError
from router.config import ForwardConfig, ListenConfig
from router.config.tls import client_tls, server_tls, system_tls
from router.discovery.engine_api import EngineApi
from router.http import server
from tests.faults.fake_engine import MODELS
from tests.faults.stage import PATIENCE_S, Engines, RawClient, Stage, chat, on_stage, words
from tests.http.certificates import Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def trusting(authority: Authority, identity: tuple[Path, Path] | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.cert)
    if identity is not None:
        context.load_cert_chain(*identity)
    return context


async def get(url: str, context: ssl.SSLContext) -> tuple[int, str]:
    """Ask on a connection of its own; return the status and the certificate's serial number."""
    host, _, path = url.removeprefix("https://").partition("/")
    name, _, port = host.partition(":")
    reader, writer = await asyncio.open_connection(name, int(port), ssl=context)
    try:
        serial = writer.get_extra_info("peercert")["serialNumber"]
        writer.write(f"GET /{path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        async with asyncio.timeout(PATIENCE_S):
            head = await reader.readuntil(b"\r\n\r\n")
        return int(head.split()[1]), serial
    finally:
        writer.transport.abort()


def listening(authority: Authority, name: str = "server") -> dict[str, Path]:
    cert, key = authority.issue(name)
    return {"listen__tls_cert": cert, "listen__tls_key": key}


# -- clients -------------------------------------------------------------------------------------


async def test_both_ports_speak_tls(authority: Authority) -> None:
    """Requests and streams as without; plain HTTP on such a port is no request."""
    cert, key = authority.issue("admin")
    settings = listening(authority) | {"admin__tls_cert": cert, "admin__tls_key": key}
    async with Engines(1) as engines, on_stage(*engines, **settings) as stage:
        context = trusting(authority)
        assert stage.url.startswith("https://")
        assert stage.admin_url.startswith("https://")
        async with aiohttp.ClientSession() as client:
            url = stage.url + "/v1/chat/completions"
            async with client.post(url, json=chat(words(1)), ssl=context) as answer:
                assert answer.status == 200
            body = chat(words(1), stream=True)
            async with client.post(url, json=body, ssl=context) as answer:
                assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        assert (await get(stage.admin_url + "/admin/replicas", context))[0] in (200, 401)
        async with RawClient.connected(stage.url.replace("https", "http")) as plain:
            await plain.send(b"GET /healthz HTTP/1.1\r\nHost: r\r\n\r\n")
            assert b"HTTP" not in await plain.rest()
        await stage.until(
            lambda: stage.metric("warmroute_connections_ended_total", reason="tls") == 1
        )


async def test_a_renewed_certificate_is_used_without_a_restart(authority: Authority) -> None:
    """A broken one is named, and the last good one stays."""
    settings = listening(authority)
    async with Engines(1) as engines, on_stage(*engines, **settings) as stage:
        context = trusting(authority)
        _, first = await get(stage.url + "/healthz", context)
        key = settings["listen__tls_key"].read_bytes()
        settings["listen__tls_key"].write_text("nothing")
        await stage.until(lambda: "file not read again" in stage.log)
        assert (await get(stage.url + "/healthz", context))[1] == first
        settings["listen__tls_key"].write_bytes(key)
        listening(authority)  # into the same files
        stage.router.read_files.want()
        await stage.until(lambda: "file read again" in stage.log)
        _, second = await get(stage.url + "/healthz", context)

    assert first != second


async def test_clients_may_have_to_show_a_certificate(authority: Authority, tmp_path: Path) -> None:
    """One of the configured authority; without, there is no connection."""
    folder = tmp_path / "other"
    folder.mkdir()
    stranger = Authority(folder).issue("stranger")
    settings = listening(authority) | {"listen__tls_client_ca": authority.cert}
    async with Engines(1) as engines, on_stage(*engines, **settings) as stage:
        url = stage.url + "/healthz"
        assert (await get(url, trusting(authority, authority.issue("client"))))[0] == 200
        for identity in (None, stranger):
            with pytest.raises((OSError, asyncio.IncompleteReadError)):
                await get(url, trusting(authority, identity))
        await stage.until(
            lambda: stage.metric("warmroute_connections_ended_total", reason="tls") == 2
        )


async def test_a_handshake_that_never_comes_is_cut(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As headers that never come."""
    monkeypatch.setattr(server, "HEADER_TIMEOUT_S", 0.3)
    settings = listening(authority)
    async with (
        Engines(1) as engines,
        on_stage(*engines, **settings) as stage,
        RawClient.connected(stage.url.replace("https", "http")) as client,
    ):
        await client.rest()
        await stage.until(
            lambda: stage.metric("warmroute_connections_ended_total", reason="tls") == 1
        )


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"tls_key": "server.key"}, "listen.tls_key: needs listen.tls_cert"),
        ({"tls_client_ca": "ca.pem"}, "listen.tls_client_ca: needs listen.tls_cert"),
        ({"tls_cert": "none.pem"}, "listen.tls_cert: No such file"),
        ({"tls_cert": "server.pem", "tls_key": "none"}, "listen.tls_key: No such file"),
        ({"tls_cert": "server.pem", "tls_key": "other.key"}, "listen.tls_key: is not the key of"),
        ({"tls_cert": "server.pem"}, "listen.tls_cert: .*server.pem has no PEM key"),
        (
            {"tls_cert": "empty", "tls_key": "server.key"},
            "listen.tls_cert: .*empty has no PEM certificate",
        ),
        (
            {"tls_cert": "server.pem", "tls_key": "server.key", "tls_client_ca": "empty"},
            "listen.tls_client_ca: no certificates in it",
        ),
    ],
)
def test_files_that_will_not_do_are_named(
    authority: Authority, tmp_path: Path, files: dict[str, str], said: str
) -> None:
    """At the start, by their keys."""
    authority.issue("server")
    authority.issue("other")
    (tmp_path / "empty").touch()
    config = ListenConfig(**{key: tmp_path / name for key, name in files.items()})

    with pytest.raises(ConfigError, match=said):
        server_tls(config, "listen")


# -- replicas ------------------------------------------------------------------------------------


@asynccontextmanager
async def engine(identity: tuple[Path, Path], ca: Path | None = None) -> AsyncIterator[str]:
    """Run an engine with TLS; with `ca` it wants certificates."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=ca)
    context.load_cert_chain(*identity)
    if ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/v1/models":
            return web.json_response(MODELS)
        found = 404 if request.path in ("/version", "/metrics", "/kv_event_sources") else 200
        return web.json_response({"choices": []}, status=found)

    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        yield f"https://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_replica_with_tls_is_served_through(authority: Authority) -> None:
    """By its authority; and with our certificate where it wants one."""
    cert, key = authority.issue("router")
    mutual = {"forward__client_cert": cert, "forward__client_key": key}
    for ca, settings in ((None, {}), (authority.cert, mutual)):
        async with (
            engine(authority.issue("engine"), ca) as url,
            on_stage(url, forward__ca_file=authority.cert, **settings) as stage,
        ):
            assert (await stage.ask(chat("a"))).status == 200


async def test_a_replica_that_the_systems_authorities_certify_is_asked(
    authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked of a replica trusts them, too, not a list of its own."""
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.cert))
    system_tls.cache_clear()
    try:
        async with engine(authority.issue("engine")) as url, EngineApi(timeout_s=PATIENCE_S) as api:
            assert (await api.facts("r", url)).models
    finally:
        system_tls.cache_clear()


async def test_renewed_credentials_for_replicas_are_used_without_a_restart(
    authority: Authority, tmp_path: Path
) -> None:
    """Our certificate and the authority's, from the next connection on."""
    folder = tmp_path / "next"
    folder.mkdir()
    following = Authority(folder, "following")
    cert, key = authority.issue("router")
    ca = tmp_path / "bundle.pem"
    ca.write_bytes(authority.cert.read_bytes())
    mutual = {"forward__client_cert": cert, "forward__client_key": key, "forward__ca_file": ca}
    async with engine(authority.issue("engine"), authority.cert) as url:
        async with on_stage(url, forward__keepalive_s=0.05, **mutual) as stage:
            assert (await stage.ask(chat("a"))).status == 200
            ca.write_bytes(authority.cert.read_bytes() + following.cert.read_bytes())
            for old, new in zip((cert, key), following.issue("router"), strict=True):
                old.write_bytes(new.read_bytes())
            stage.router.read_files.want()
            await stage.until(lambda: "file read again" in stage.log)
            async with engine(following.issue("engine"), following.cert) as other:
                added = await stage.admin("/admin/replicas", {"url": other})
                assert added.status == 201
                await stage.until(lambda: len(stage.router.fleet.members.replicas) == 2)


async def reason(stage: Stage) -> str:
    """Wait until the router has said why it does not use its replica; no request gets through."""
    await stage.until(lambda: "replica not usable yet" in stage.log)
    reply = await stage.ask(None, "/readyz", method="GET")
    assert reply.status == 503
    assert (await stage.ask(chat("a"))).status == 503
    return reply.body.decode()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("authority", "certificate is not accepted: unable to get local issuer"),
        ("expired", "certificate is not accepted: certificate has expired"),
        ("name", "certificate is not accepted: IP address mismatch"),
        (
            "plain",
            "no TLS with it: WRONG_VERSION_NUMBER; does it speak plain HTTP? Then write http://",
        ),
    ],
)
async def test_a_replica_whose_certificate_will_not_do_is_named(
    authority: Authority, tmp_path: Path, fault: str, said: str
) -> None:
    """Not used, with the reason; the router goes on."""
    folder = tmp_path / "wrong"
    folder.mkdir()
    identity = {
        "authority": lambda: Authority(folder).issue("engine"),
        "expired": lambda: authority.issue("engine", days=-1),
        "name": lambda: authority.issue("engine", names="DNS:elsewhere"),
        "plain": lambda: authority.issue("engine"),
    }[fault]()
    async with Engines(1) as (plain,), engine(identity) as url:
        if fault == "plain":
            url = plain.url.replace("http", "https")
        async with on_stage(url, ready=False, forward__ca_file=authority.cert) as stage:
            assert said in await reason(stage)


def test_files_for_replicas_that_will_not_do_are_named(
    authority: Authority, tmp_path: Path
) -> None:
    """At the start, by their keys."""
    key = authority.issue("router")[1]

    with pytest.raises(ConfigError, match=r"forward.ca_file: No such file"):
        client_tls(ForwardConfig(ca_file=tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"forward.client_key: needs forward.client_cert"):
        client_tls(ForwardConfig(client_key=key))
