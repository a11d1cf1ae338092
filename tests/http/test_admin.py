"""router.http.admin in a whole router: what operators see and do, and who may."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from router.base.errors import ConfigError
from tests.faults.stage import SECRET, SESSION, Engines, chat, on_stage, words


async def test_replicas_are_described() -> None:
    """Those found with their load, cache and contract; those not found with what they lack."""
    closed = "http://127.0.0.1:9"
    async with Engines(1) as (engine,), on_stage(engine.url, closed) as stage:
        await stage.ask(chat(words(1)))
        await stage.settled(engine)
        replicas = (await stage.admin("/admin/replicas")).json()["replicas"]

        (rank,) = replicas[0]["ranks"]
        assert rank["cache"] == "exact"
        assert rank["contract"]["algorithm"] == "sha256"
        assert rank["num_gpu_blocks"] > 0
        assert rank["status"]["num_requests"] == 0
        assert replicas[1]["name"] == "r2"
        assert "refused" in replicas[1]["waiting_for"]


async def test_draining_takes_a_replica_out_and_back() -> None:
    """What runs there goes on; new requests go elsewhere."""
    async with Engines(2) as engines, on_stage(*engines) as stage:
        first = await stage.ask(chat(words(1)))
        await stage.settled(*engines)
        drained = await stage.admin(f"/admin/replicas/{first.replica}/drain", {"draining": True})
        elsewhere = await stage.ask(chat(words(1)))
        assert not stage.metric("warmroute_replica_healthy", replica=first.replica)
        await stage.admin(f"/admin/replicas/{first.replica}/drain", {"draining": False})
        back = await stage.ask(chat(words(1)))

        assert drained.json() == {"name": first.replica, "draining": True}
        assert elsewhere.replica != first.replica
        assert back.status == 200
        assert stage.metric("warmroute_replica_healthy") == 2


async def test_wrong_orders_are_refused() -> None:
    """Unknown replica, unknown field, no JSON, unknown page."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        path = "/admin/replicas/r1/drain"
        unknown = await stage.admin("/admin/replicas/r9/drain", {"draining": True})
        answers = [
            await stage.admin(path, {"drain": True}),
            await stage.admin(path, {"draining": "yes"}),
            await stage.admin(path, b"["),
            await stage.admin(path, b"[" * 100_000),
            await stage.admin(path, b""),
            await stage.admin("/admin/explain", b"no json"),
            await stage.admin("/admin/explain", {"messages": 3}),
        ]
        nothing = await stage.admin("/admin/nothing")

        assert (unknown.status, unknown.error["param"]) == (404, "name")
        assert "r1" in unknown.error["message"]
        assert [answer.status for answer in answers] == [400] * 7
        assert nothing.status == 404


async def test_explaining_shows_the_decision_and_changes_nothing() -> None:
    """Every candidate's costs; no lease, no session, no count of decisions."""
    async with Engines(2) as engines, on_stage(*engines) as stage:
        first = await stage.ask(chat(words(1)))
        await stage.settled(*engines)
        before = stage.metric("warmroute_decisions_total")
        explained = (
            await stage.admin("/admin/explain?tokens=1", chat(words(1)), {"X-Session-ID": SESSION})
        ).json()
        by_text = await stage.admin("/admin/explain", {"model": "tiny", "prompt": words(1)})
        second = await stage.ask(chat(words(1)))

        assert explained["decision"]["candidate"] == first.replica == second.replica
        assert len(explained["decision"]["costs"]) == len(explained["candidates"]) == 2
        assert explained["num_tokens"] == len(explained["token_ids"])
        assert len(explained["keys"]) == explained["num_tokens"] // 16
        assert by_text.status == 200
        assert before == stage.metric("warmroute_decisions_total") - 1
        assert second.predicted == second.reported > 0
        assert all(engine.replica.ranks[0].stats.finished["stop"] <= 2 for engine in engines)


async def test_a_token_is_required_where_there_is_one(tmp_path: Path) -> None:
    """On every page; off loopback a router does not even start without."""
    file = tmp_path / "token"
    file.write_text(f"{SECRET}-token\n")
    async with Engines(1) as engines, on_stage(*engines, admin__token_file=file) as stage:
        right = {"Authorization": f"Bearer {SECRET}-token"}
        wrong = ["", "Bearer ", "Bearer x", f"Bearer {SECRET}-token2", f"{SECRET}"]
        pages = ["/admin/replicas", "/admin/config", "/admin/metrics", "/admin/nothing"]
        for given in wrong:
            headers = {"Authorization": given} if given else {}
            assert [(await stage.admin(page, None, headers)).status for page in pages] == [401] * 4
            order = await stage.admin("/admin/replicas/r1/drain", {"draining": True}, headers)
            assert order.status == 401
        assert [(await stage.admin(page, None, right)).status for page in pages] == [
            200,
            200,
            200,
            404,
        ]
        config = await stage.admin("/admin/config", None, right)

        assert SECRET not in config.body.decode()
        assert orjson.loads(config.body)["admin"]["token_file"] == str(file)


@pytest.mark.parametrize("content", [None, "", "  \n"])
async def test_a_token_file_without_a_token_stops_the_start(
    tmp_path: Path, content: str | None
) -> None:
    """Missing or empty: no admin port that everybody may use."""
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"admin\.token_file"):
        async with on_stage("http://127.0.0.1:9", admin__token_file=file):
            pass


async def test_the_admin_pages_are_not_on_the_data_port() -> None:
    """There they are routes like others, which it does not serve."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        reply = await stage.ask(None, "/admin/config", method="GET")

        assert reply.status == 404
        assert "not served here" in reply.error["message"]


@pytest.mark.parametrize(
    ("order", "status", "param", "said"),
    [
        ({}, 400, None, "missing required field `url`"),
        ({"url": "ftp://x"}, 400, "url", "write http://HOST:PORT"),
        ({"url": "http://127.0.0.1:9", "name": "a/b"}, 400, "name", "must consist of letters"),
        ({"url": "http://127.0.0.1:9", "evens": []}, 400, None, "unknown field `evens`"),
        ({"url": "http://127.0.0.1:9", "events": ["x"]}, 400, "events", "not tcp://HOST:PORT"),
        ({"url": "http://127.0.0.1:9", "name": "r1"}, 409, "name", "is taken"),
    ],
)
async def test_wrong_replicas_are_refused(
    order: dict[str, object], status: int, param: str | None, said: str
) -> None:
    """What the configuration would refuse, and what is another's; in the usual error shape."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        reply = await stage.admin("/admin/replicas", order)

        assert (reply.status, reply.error["param"], reply.error["code"]) == (status, param, status)
        assert said in reply.error["message"]
        assert len((await stage.admin("/admin/replicas")).json()["replicas"]) == 1


async def test_adding_twice_is_no_error() -> None:
    """201 the first time, 200 the second."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        order = {"url": "http://127.0.0.1:9", "name": "east"}
        first = await stage.admin("/admin/replicas", order)
        second = await stage.admin("/admin/replicas", order)

        assert (first.status, second.status) == (201, 200)
        added = {"name": "east", "url": order["url"]}
        assert first.json() == added | {"is_new": True}
        assert second.json() == added | {"is_new": False}
