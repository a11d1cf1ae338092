"""router.http.guard in a whole router: web pages in an operator's browser, and strangers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.stage import SECRET, Engines, Stage, on_stage

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
