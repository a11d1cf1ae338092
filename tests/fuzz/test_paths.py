"""Fuzz: however a path is spelt, no engine sees one that is not on the list."""

from __future__ import annotations

import re
from urllib.parse import unquote

from hypothesis import example, given
from hypothesis import strategies as st

from router.api.routes import KNOWN, Routes
from router.base.errors import MethodNotAllowed, UnknownRoute
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import RawClient, on_stage

CONTROL = (
    "sleep",
    "metrics",
    "reset_prefix_cache",
    "v1/load_lora_adapter",
    "collective_rpc",
    "x/p",
)
SERVED = (*(path[1:] for path in KNOWN), "v1/responses/r_1", "v1/responses/r_1/cancel")
BETWEEN = (
    "/", "//", "/./", "/../", "/%2e%2e/", "/%2E/", "%2f", "%2F", "\\", "%5c", "/;/", "/%00/", "?",
    "/x/../", "/%252e%252e/", "#", "%3f", "/..;/", "/.%2e/", "/\u2025/", "/\uff0e\uff0e/",
)  # fmt: skip
METHODS = ("GET", "POST", "OPTIONS", "HEAD", "PUT", "DELETE")
ROUTES = Routes(["/open/*", "GET /v1/files"])


@st.composite
def spelt(draw: st.DrawFn) -> str:
    """Write paths one behind another, each with what separates it, some letters escaped."""
    parts = []
    for name in draw(
        st.lists(st.sampled_from((*CONTROL, *SERVED, "open", "open/a", "")), max_size=4)
    ):
        written = "".join(
            f"%{ord(letter):02x}" if draw(st.integers(0, 9)) == 0 else letter for letter in name
        )
        parts += [draw(st.sampled_from(BETWEEN)), written]
    return draw(st.sampled_from(("/", "/v1", "", "/open/"))) + "".join(parts) + draw(
        st.sampled_from(("", "/", "//", "/.", "/..", ";x", "%20", " ", "%00", "\t"))
    )  # fmt: skip


def meanings(path: str) -> set[str]:
    """Read a path as servers do that are more generous than one another."""
    found = {path}
    for _ in range(3):
        found |= {unquote(each) for each in found}
        found |= {each.replace("\\", "/") for each in found}
        found |= {re.sub(r";[^/]*", "", each) for each in found}
        found |= {re.split(r"[?#\0]", each, maxsplit=1)[0] for each in found}
        found |= {re.sub(r"/+", "/", each) for each in found}
        found |= {without_dots(each) for each in found}
    return {each.rstrip("/ \t") or "/" for each in found}


def without_dots(path: str) -> str:
    kept: list[str] = []
    for segment in path.split("/"):
        if segment == "..":
            del kept[-1:]
        elif segment != ".":
            kept.append(segment)
    return "/" + "/".join(kept).lstrip("/")


@example("GET", "/open/")
@given(
    st.sampled_from(METHODS), spelt() | st.text(max_size=30) | st.text("/.%25cefA;\\", max_size=12)
)
def test_what_is_forwarded_means_only_what_was_let_through(method: str, path: str) -> None:
    """However it is read: it is on the list, or below the prefix."""
    try:
        route = ROUTES.find(method, path)
    except (UnknownRoute, MethodNotAllowed):
        return

    assert route.path in (path, path[:-1])
    for meaning in meanings(route.path):
        assert (
            meaning.startswith("/open/")
            or meaning in ("/v1/files", *(f"/{name}" for name in SERVED))
            or re.fullmatch(r"/v1/responses/[\w-]+(/cancel|/input_items)?", meaning)
        )


async def test_no_spelling_reaches_an_engine() -> None:
    """Through a whole router: of a control route none arrives, whatever is done to its name."""
    bad = [f"/v1{between}{name}" for between in BETWEEN for name in CONTROL[:2]]
    bad += [f"{between}{name}" for between in BETWEEN for name in CONTROL[:2] if between[0] == "/"]
    bad += [f"/{name[:i]}%{ord(name[i]):02X}{name[i + 1 :]}" for name in CONTROL for i in range(3)]
    async with FakeEngine() as engine, on_stage(engine) as stage:
        for path in bad:
            async with RawClient.connected(stage.url) as client:
                line = f"POST {path} HTTP/1.1\r\nHost: r\r\nContent-Length: 0\r\n\r\n"
                await client.send(line.encode())
                assert await client.status() in (400, 404, 405), path

        assert engine.received == []
