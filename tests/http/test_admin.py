"""router.http.admin in a whole router: what operators see and do, and who may.

router.http.admin in a whole router: web pages in an operator's browser, and strangers.

router.http.admin_token: the token that a router makes when it is given none.
"""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import orjson
import pytest
from click.testing import CliRunner

from router import config
from router.base.errors import ConfigError
from router.cli import main
from router.http.admin_token import default_file, with_token
from tests.faults.stage import SECRET, SESSION, Engines, Stage, chat, on_stage, words


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
        assert rank["num_requests"] == 0
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


NEW = {"url": "http://127.0.0.1:9"}


async def replicas(stage: Stage, headers: dict[str, str]) -> int:
    return len((await stage.admin("/admin/replicas", None, headers)).json()["replicas"])


@pytest.mark.parametrize(
    ("headers", "status", "field"),
    [
        ({"Content-Type": "text/plain"}, 415, "Content-Type"),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415, "Content-Type"),
        ({"Content-Type": "application/json-patch"}, 415, "Content-Type"),
        ({"Origin": "http://evil.example"}, 403, "Origin"),
        ({"Origin": "null"}, 403, "Origin"),
        ({"Origin": ""}, 403, "Origin"),
        ({"Host": "evil.example:8081"}, 403, "Host"),
        ({"Host": "127.0.0.1.evil.example"}, 403, "Host"),
        ({"Host": ""}, 403, "Host"),
        (
            {"Host": "evil.example", "Origin": "http://evil.example", "Content-Type": "text/plain"},
            403,
            "Host",
        ),
    ],
)
async def test_what_a_web_page_can_send_is_refused(
    headers: dict[str, str], status: int, field: str
) -> None:
    """Even where no token is asked for: no replica is added, no prompt goes there."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        reply = await stage.admin("/admin/replicas", NEW, headers)

        assert (reply.status, reply.error["param"]) == (status, field)
        assert await replicas(stage, {}) == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:1", "[::1]:8081", "admin.example:8081"])
async def test_the_port_has_its_own_names(host: str) -> None:
    """Addresses, localhost, and those of admin.hosts; a page of the port itself may ask, too."""
    async with Engines(1) as engines, on_stage(*engines, admin__hosts=["Admin.example"]) as stage:
        headers = {"Host": host, "Origin": f"http://{host}"}

        assert (await stage.admin("/admin/replicas", NEW, headers)).status == 201


async def test_a_stranger_is_logged_and_learns_nothing(tmp_path: Path) -> None:
    """Who it was and why, not what was sent; 401 asks for a token."""
    file = tmp_path / "token"
    file.write_text(f"{SECRET}-token")
    async with Engines(1) as engines, on_stage(*engines, admin__token_file=file) as stage:
        wrong = {"Authorization": f"Bearer {SECRET}-other"}
        basic = {"Authorization": f"Basic {SECRET}-token"}
        replies = [await stage.admin("/admin/replicas", NEW, sent) for sent in (wrong, basic, {})]

        assert {reply.status for reply in replies} == {401}
        assert replies[0].headers["WWW-Authenticate"] == "Bearer"
        assert stage.log.count("admin request refused") == 2 * 3  # as text and as JSON
        assert "127.0.0.1" in stage.log


@pytest.mark.parametrize(
    ("order", "param"),
    [
        ({"url": "http://169.254.169.254"}, "url"),
        ({"url": "http://2852039166:80"}, "url"),
        ({"url": "http://[::ffff:169.254.169.254]"}, "url"),
        ({"url": "http://example.com"}, "url"),
        ({"url": "http://127.0.0.1:9", "events": ["tcp://169.254.1.1:5557"]}, "events"),
        ({"url": "http://127.0.0.1:9", "events": ["ipc:///run/docker.sock"]}, "events"),
        (
            {
                "url": "http://127.0.0.1:9",
                "events": ["tcp://127.0.0.1:1"],
                "replay": ["tcp://8.8.8.8:1"],
            },
            "replay",
        ),
    ],
)
async def test_a_replica_is_added_only_where_one_may_be(
    order: dict[str, object], param: str
) -> None:
    """The message names the setting; what is there already stays."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        reply = await stage.admin("/admin/replicas", order)

        assert (reply.status, reply.error["param"]) == (400, param)
        assert "admin.replica_hosts" in reply.error["message"]
        assert await replicas(stage, {}) == 1


REPLICA = {("replicas",): ["http://127.0.0.1:9"]}


def environ(directory: Path) -> dict[str, str]:
    return {"XDG_STATE_HOME": str(directory), "HOME": "/nowhere"}


def test_a_token_is_made_once_for_its_user_alone(tmp_path: Path) -> None:
    """Mode 0600, long, and the same at the next start."""
    made = with_token(config.load(flags=REPLICA), environ(tmp_path)).admin.token_file
    assert made is not None
    token = made.read_text()
    again = with_token(config.load(flags=REPLICA), environ(tmp_path)).admin.token_file

    assert made == again == tmp_path / "warmroute" / "admin-token"
    assert len(token.strip()) >= 43
    assert again.read_text() == token
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    assert stat.S_IMODE(made.parent.stat().st_mode) == 0o700
    assert [file.name for file in made.parent.iterdir()] == ["admin-token"]


def test_routers_that_start_at_once_have_one_token(tmp_path: Path) -> None:
    """No process reads half of one, and none replaces another's."""

    def start(_: int) -> str:
        file = with_token(config.load(flags=REPLICA), environ(tmp_path)).admin.token_file
        assert file is not None
        return file.read_text()

    with ThreadPoolExecutor(8) as pool:
        tokens = set(pool.map(start, range(32)))

    assert len(tokens) == 1
    assert len(tokens.pop()) > 40


@pytest.mark.parametrize("key", ["open", "token_file"])
def test_a_named_token_is_not_generated(tmp_path: Path, key: str) -> None:
    """A file of one's own, or none at all on loopback."""
    value: object = True if key == "open" else str(tmp_path / "mine")
    loaded = config.load(flags=REPLICA | {("admin", key): value})

    assert with_token(loaded, environ(tmp_path)) == loaded
    assert not (tmp_path / "warmroute").exists()


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """The message says what to do."""
    file = default_file(environ(tmp_path))
    file.parent.mkdir()
    file.write_text("t\n")
    file.chmod(0o644)

    with pytest.raises(ConfigError, match=r"other users can read .*chmod 600"):
        with_token(config.load(flags=REPLICA), environ(tmp_path))


def test_where_no_token_can_be_kept_the_start_is_refused(tmp_path: Path) -> None:
    """Rather than an admin port that is open, or one that cannot be used."""
    (tmp_path / "state").write_text("a file")

    with pytest.raises(ConfigError, match=r"\(admin\.token_file\)"):
        with_token(config.load(flags=REPLICA), environ(tmp_path / "state"))


def test_the_token_can_be_printed(tmp_path: Path) -> None:
    """For curl; where there is none, the message says who makes it."""
    runner = CliRunner()
    missing = runner.invoke(main, ["admin-token"], env=environ(tmp_path))
    file = with_token(config.load(flags=REPLICA), environ(tmp_path)).admin.token_file
    printed = runner.invoke(main, ["admin-token"], env=environ(tmp_path))

    assert file is not None
    assert printed.stdout == file.read_text()
    assert missing.exit_code == 1
    assert "`warmroute serve`" in missing.stderr
