"""What a browser is told about the page before it runs: no data, and no other script."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path

import pytest

from tests.faults.stage import SECRET, Engines, on_stage


async def test_the_page_needs_no_token_and_has_no_data(tmp_path: Path) -> None:
    """Only its own script and style run, named by their hashes; nothing may frame it."""
    file = tmp_path / "token"
    file.write_text(f"{SECRET}-token")
    async with Engines(1) as engines, on_stage(*engines, admin__token_file=file) as stage:
        page = await stage.admin("/")

    html, policy = page.body.decode(), page.headers["Content-Security-Policy"]
    assert page.status == 200
    assert 'data-token="needed"' in html
    assert policy.startswith("default-src 'none'; ")
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    for element in ("script", "style"):
        (text,) = re.findall(f"<{element}>(.*?)</{element}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{element}-src 'sha256-{digest}'" in policy
    assert page.headers["Cache-Control"] == "no-store"
    assert not re.search(r"""(?:src|href)=["']?https?:""", html)
    assert "innerHTML" not in html
    assert "127.0.0.1" not in html


async def test_an_open_port_is_said_not_to_need_a_token() -> None:
    """So the page asks at once."""
    async with Engines(1) as engines, on_stage(*engines) as stage:
        assert b'data-token="none"' in (await stage.admin("/")).body


@pytest.mark.parametrize(
    ("headers", "field"),
    [
        ({"Host": "evil.example"}, "Host"),
        ({"Origin": "http://evil.example"}, "Origin"),
        ({"Origin": "null"}, "Origin"),
    ],
)
async def test_other_pages_get_nothing(headers: dict[str, str], field: str) -> None:
    async with Engines(1) as engines, on_stage(*engines) as stage:
        for path in ("/", "/admin/live", "/admin/state"):
            reply = await stage.admin(path, headers=headers)
            assert (reply.status, reply.error["param"]) == (403, field)
