"""Tenants in a whole router: who is let in, to what, how often, and what engines are sent."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from router.api.body import without_fields
from router.tenants.tenants import digest_of, written
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import SECRET, Engines, Json, chat, on_stage, streamed, words
from tests.faults.tenants import SALT, A, B, C, tenants_file

# -- keys ----------------------------------------------------------------------------------------


async def test_only_keys_of_the_file_are_let_in(tmp_path: Path) -> None:
    """On every route that is answered for a client; 401 in each API's own words."""
    settings = {"tenants__file": tenants_file(tmp_path)}
    wrong: list[Json] = [{"Authorization": ""}, {"Authorization": f"Bearer {SECRET}"}]
    async with FakeEngine() as engine, on_stage(engine, **settings) as stage:
        for headers in wrong:
            for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
                reply = await stage.ask(chat("a"), path, headers=headers)
                assert (reply.status, reply.error["type"]) == (401, "AuthenticationError")
                assert reply.headers["WWW-Authenticate"] == "Bearer"
            reply = await stage.ask(chat("a"), "/v1/messages", headers=headers)
            assert (reply.status, reply.json()["error"]["type"]) == (401, "authentication_error")
            reply = await stage.ask(path="/v1/models", method="GET", headers=headers)
            assert reply.status == 401
        assert engine.received == []
        anthropic = {"Authorization": "", "x-api-key": f"sk-{SECRET}-a"}
        for headers in (A, B, C, anthropic):
            assert (await stage.ask(chat("a"), "/v1/messages", headers=headers)).status == 200
        for path in ("/healthz", "/readyz"):
            assert (await stage.ask(path=path, method="GET", headers=wrong[0])).status == 200


async def test_metrics_are_for_operators(tmp_path: Path) -> None:
    """They describe every tenant: loopback and listen.trusted see them, others do not."""
    path = tenants_file(tmp_path)
    for settings, status in (({"tenants__file": path}, 403), ({}, 200)):
        async with FakeEngine() as engine, on_stage(engine, **settings) as stage:
            far = {"X-Forwarded-For": "192.0.2.1"}
            reply = await stage.ask(path="/metrics", method="GET", headers=A | far)
            assert reply.status == status
            assert (await stage.ask(path="/metrics", method="GET", headers=A)).status == 200


async def test_engines_get_their_own_key_and_no_tenants(tmp_path: Path) -> None:
    """The engine's key to configured replicas; to one that was added, none."""
    key = tmp_path / "engine.key"
    key.write_text(f"{SECRET}-engine")
    settings = {"tenants__file": tenants_file(tmp_path), "engine__api_key_file": key}
    async with FakeEngine() as engine, FakeEngine() as added:
        async with on_stage(engine, **settings) as stage:
            sent = A | {"x-api-key": f"sk-{SECRET}-b", "Cookie": "a=b"}
            assert (await stage.ask(chat("a"), headers=sent)).status == 200
            got = engine.received[0].headers
            assert got["Authorization"] == f"Bearer {SECRET}-engine"
            assert "x-api-key" not in got
            assert got["Cookie"] == "a=b"

            await stage.admin("/admin/replicas", {"url": added.url})
            await stage.admin("/admin/replicas/r1/drain", {"draining": True})
            await stage.until(lambda: stage.metric("warmroute_replica_healthy", replica="r2"))
            assert (await stage.ask(chat("a"), headers=A)).status == 200
            assert "Authorization" not in added.received[0].headers


async def test_models_are_a_tenants_own(tmp_path: Path) -> None:
    """Listed, or 404 as a model that is not there; a body without one says what to name."""
    settings = {"tenants__file": tenants_file(tmp_path, b="models: [other]")}
    settings |= {"models__aliases": {"small": "tiny"}}
    async with FakeEngine() as engine, on_stage(engine, **settings) as stage:
        listed = await stage.ask(path="/v1/models", method="GET", headers=A)
        assert [model["id"] for model in listed.json()["data"]] == ["tiny", "small"]
        listed = await stage.ask(path="/v1/models", method="GET", headers=B)
        assert listed.json()["data"] == []
        for model in ("tiny", "none"):
            reply = await stage.ask(chat("a", model=model), headers=B)
            assert (reply.status, reply.error["param"]) == (404, "model")
            assert "yours: other" in reply.error["message"]
        reply = await stage.ask({"input": "x"}, "/v1/embeddings", headers=B)
        assert (reply.status, reply.error["param"]) == (400, "model")
        assert engine.received == []


async def test_the_file_is_followed_while_it_serves(tmp_path: Path) -> None:
    """A key that goes is refused; a file that cannot be used changes nothing, and is counted."""
    path = tenants_file(tmp_path)
    async with FakeEngine() as engine, on_stage(engine, tenants__file=path) as stage:
        good = path.read_text()
        path.write_text("tenants: [")
        await stage.until(lambda: stage.metric("warmroute_tenants_file_reads_total", result="bad"))
        assert (await stage.ask(chat("a"), headers=A)).status == 200
        path.write_text(good.replace("name: a", "name: d").replace("sha256:", "sha256:", 1))
        await stage.until(lambda: stage.metric("warmroute_tenants_file_reads_total", result="ok"))
        assert (await stage.ask(chat("a"), headers=A)).status == 200

        assert stage.metric("warmroute_tenant_requests_total", tenant="a") == 1
        assert stage.metric("warmroute_tenant_requests_total", tenant="d") == 1


# -- limits --------------------------------------------------------------------------------------


async def test_requests_in_flight_are_held(tmp_path: Path) -> None:
    """One more is refused before its body is read; another tenant is not concerned."""
    path = tenants_file(tmp_path, a="max_in_flight: 1, body_bytes: 1000")
    may_answer = asyncio.Event()

    async def late(_: web.Request) -> web.StreamResponse:
        await may_answer.wait()
        return web.json_response({})

    async with (
        FakeEngine(late) as engine,
        on_stage(engine, tenants__file=path) as stage,
        asyncio.TaskGroup() as tg,
    ):
        held = tg.create_task(stage.ask(chat("a"), headers=A))
        await stage.until(lambda: engine.received)
        reply = await stage.ask(chat("x" * 1000), headers=A)
        may_answer.set()
        others = await stage.ask(chat("x" * 1000), headers=B)
        first = await held
        again = await stage.ask(chat("a"), headers=A)
        refusals = {"tenant": "a", "outcome": "rate_limit_exceeded"}
        num_refused = stage.metric("warmroute_tenant_requests_total", **refusals)

    assert (reply.status, reply.headers["Retry-After"]) == (429, "1")
    assert reply.error["type"] == "RateLimitError"
    assert [each.status for each in (others, first, again)] == [200, 200, 200]
    assert num_refused == 1


async def test_a_tenants_uncached_tokens_are_counted(tmp_path: Path) -> None:
    """What is cached is not counted again, nor is what fails."""
    path = tenants_file(tmp_path)
    async with Engines(1) as engines, on_stage(*engines, tenants__file=path) as stage:

        def num(kind: str) -> float:
            return stage.metric("warmroute_tenant_tokens_total", tenant="a", kind=kind)

        first = await stage.ask(chat(words(1)), headers=A)
        await stage.knows(*engines)
        num_tokens = first.usage["prompt_tokens"]
        await stage.until(lambda: num("prompt") == num("uncached") == num_tokens)
        again = await stage.ask(streamed(chat(words(1))), headers=A)
        assert again.reported == num_tokens // 16 * 16
        await stage.until(lambda: num("prompt") == 2 * num_tokens)
        await stage.until(lambda: num("uncached") == 2 * num_tokens - again.reported)


# -- salts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"]
)
async def test_only_the_salt_of_a_body_changes(tmp_path: Path, path: str) -> None:
    """On every route; the client's own is taken in, however it is spelt and however often."""
    rest = b'"prompt":"a","messages":[ {"role":"user","content":"a"} ] , "z":1.10}'
    cases: list[tuple[bytes, Any]] = [
        (b'{ "model":"tiny",' + rest, None),
        (b'{"cache_salt":null, "model":"tiny",' + rest, None),
        (b'{"cache_salt":"one", "model":"tiny",' + rest, "one"),
        (b'{"cache_salt":"two","cache\\u005fsalt":"one", "model":"tiny",' + rest, "one"),
        (b'{"model":"tiny","cache_salt":"' + SALT.encode() + b'",' + rest, SALT),
    ]
    settings = {"tenants__file": tenants_file(tmp_path)}
    salts: dict[tuple[str, Any], set[str]] = {}
    async with FakeEngine() as engine, on_stage(engine, **settings) as stage:
        for name, headers in (("a", A), ("b", B)):
            for body, sent in cases:
                reply = await stage.ask(body, path, headers=headers)
                got = engine.received.pop().body
                assert reply.status == 200
                assert got.count(b"cache_salt") == 1
                salt = orjson.loads(got)["cache_salt"]
                assert without_fields(got, ["cache_salt"]) == without_fields(body, ["cache_salt"])
                salts.setdefault((name, sent), set()).add(salt)
            for sent in (5, "", "a@b", "x" * 129):
                reply = await stage.ask(chat("a", cache_salt=sent), path, headers=headers)
                assert reply.status == 400
        body = cases[0][0]
        assert (await stage.ask(body, path, headers=C)).status == 200
        assert engine.received.pop().body == body

    assert all(len(each) == 1 for each in salts.values())
    assert len(set.union(*salts.values())) == len(salts) == 6  # never another's
    assert salts["b", None] == {SALT}


async def test_a_body_that_cannot_be_salted_is_refused(tmp_path: Path) -> None:
    """It would be cached with everybody's; who shares the cache may send it."""
    settings = {"tenants__file": tenants_file(tmp_path)}
    async with FakeEngine() as engine, on_stage(engine, **settings) as stage:
        for headers, status in ((A, 415), (C, 200)):
            sent = headers | {"Content-Type": "multipart/form-data; boundary=x"}
            reply = await stage.ask(b"--x--", "/v1/audio/transcriptions", headers=sent)
            assert reply.status == status
        assert len(engine.received) == 1


async def test_no_tenant_sees_anothers_cache(tmp_path: Path) -> None:
    """By the header, by usage, by the dry run; each sees its own, to the block. c and d share."""
    digest = written(digest_of(f"sk-{SECRET}-d"))
    path = tenants_file(tmp_path, f"{{name: d, keys: ['{digest}'], cache: shared}}")
    d = {"Authorization": f"Bearer sk-{SECRET}-d"}
    async with Engines(2) as engines, on_stage(*engines, tenants__file=path) as stage:
        for headers, name in ((A, "a"), (B, "b"), (C, "c")):
            for streams in (False, True):
                body = streamed(chat(words(1))) if streams else chat(words(1))
                explained = (await stage.admin(f"/admin/explain?tenant={name}", body)).json()
                known = max(c["view"]["num_gpu_tokens"] for c in explained["candidates"])
                reply = await stage.ask(body, headers=headers)
                await stage.knows(*engines)
                expected = reply.usage["prompt_tokens"] // 16 * 16 if streams else 0
                assert reply.predicted == reply.reported == known == expected
                assert explained["tenant"] == name
        user = await stage.ask(chat(words(1), cache_salt="user"), headers=A)
        assert user.predicted == user.reported == 0
        shared = await stage.ask(chat(words(1)), headers=d)
        assert shared.predicted == shared.reported > 0
        unknown = await stage.admin("/admin/explain?tenant=unknown", chat("a"))
        assert (unknown.status, unknown.error["param"]) == (400, "tenant")


async def test_records_and_log_name_the_tenant(tmp_path: Path) -> None:
    """And no key, digest or salt (every stage looks for them at its end)."""
    records = tmp_path / "decisions.jsonl"
    path = tenants_file(tmp_path)
    async with Engines(1) as engines:
        async with on_stage(*engines, tenants__file=path, log__decisions=records) as stage:
            await stage.ask(chat(words(1)), headers=A)
            await stage.ask(chat(words(1), model="none"), headers=B)
            assert '"tenant":"a"' in stage.log
            assert '"tenant":"b"' in stage.log
            assert digest_of(f"sk-{SECRET}-a").hex() not in stage.log
    assert [orjson.loads(line)["tenant"] for line in records.read_bytes().splitlines()] == ["a"]
