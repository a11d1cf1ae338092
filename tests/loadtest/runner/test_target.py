"""What is asked of a target first, and what is said when it does not do.

What may be asked of a replay, and what is kept out of sight.
"""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from loadtest.runner import ReplayOptions
from loadtest.runner.target import Target, TargetError, base_url, look
from tests.faults.fake_engine import FakeEngine
from tests.ports import free_port

TWO = {"data": [{"id": "a", "max_model_len": 4096}, {"id": "b"}]}


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("http://127.0.0.1:8080/v1", "http://127.0.0.1:8080"),
        ("https://HOST/router/v1/", "https://HOST/router"),
        ("http://[::1]:8080/", "http://[::1]:8080"),
    ],
)
def test_base_urls_come_in_one_form(given: str, url: str) -> None:
    """With or without `/v1` and slashes: the same target."""
    assert base_url(given) == url


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("127.0.0.1:8080", "write it like http://127.0.0.1:8080"),
        ("localhost", "write it like http://localhost"),
        ("ftp://HOST", "write it like http://HOST:PORT"),
        ("http://", "is no base URL"),
        ("http://HOST:port", "Port could not be cast"),
        ("http://HOST:99999", "Port out of range"),
        ("http://me:secret@HOST", "--api-key-file"),
        ("http://HOST/?key=1", "has a query"),
    ],
)
def test_what_is_no_base_url(given: str, words: str) -> None:
    """A wrong URL is named, with how to write it; credentials in it are not repeated."""
    with pytest.raises(TargetError) as caught:
        base_url(given)

    assert words in str(caught.value)
    assert "secret" not in str(caught.value)


async def seen(url: str, *, model: str | None = None, has_key: bool = False) -> Target:
    async with aiohttp.ClientSession() as client:
        return await look(client, url, model=model, has_key=has_key)


async def test_the_only_model_is_taken() -> None:
    """With one model there is nothing to choose; its longest sequence is used if known."""
    async with FakeEngine() as engine:
        assert await seen(engine.url) == Target(url=engine.url, model="tiny", max_model_len=None)
    async with FakeEngine(**{"v1/models": TWO}) as engine:
        assert (await seen(engine.url, model="a")).max_model_len == 4096


@pytest.mark.parametrize(
    ("page", "options", "words"),
    [
        (TWO, {}, "serves a, b: choose one with --model"),
        (TWO, {"model": "c"}, "does not serve 'c', but a, b"),
        ({"data": []}, {}, "serves no model yet"),
        ({"data": 5}, {}, "list of models"),
        ({"hello": 1}, {}, "list of models"),
        ((200, "<html>"), {}, "list of models"),
        ((401, '{"error": "no key"}'), {}, "answers 401: no key (it wants an API key: --api-key"),
        ((401, "no"), {"has_key": True}, "the API key that was sent is not accepted"),
        ((404, ""), {}, "answers 404: nothing more (is this the base URL"),
        ((503, "starting"), {}, "answers 503: starting (is a replica of it ready?)"),
        ((500, "oops"), {}, "answers 500: oops"),
    ],
)
async def test_what_does_not_do(page: Any, options: dict[str, Any], words: str) -> None:
    """Answers that are no list of models, and models that are not served: with what to do."""
    async with FakeEngine(**{"v1/models": page}) as engine:
        with pytest.raises(TargetError) as caught:
            await seen(engine.url, **options)

    assert words in str(caught.value)


async def test_no_server_at_the_address() -> None:
    """A refused connection asks whether the target is running."""
    with pytest.raises(TargetError, match="is it running"):
        await seen(f"http://127.0.0.1:{free_port()}")


async def test_a_target_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that accepts and says nothing is not waited for."""
    monkeypatch.setattr("loadtest.runner.target.TIMEOUT_S", 0.1)
    async with FakeEngine() as engine:
        engine.hangs = True
        with pytest.raises(TargetError, match="did not answer"):
            await seen(engine.url)


def test_keys_and_headers_are_not_shown() -> None:
    """Neither the API key nor the value of a header is in the options' repr."""
    shown = repr(ReplayOptions(api_key="sk-1", headers={"X-Key": "sk-2"}, model="tiny"))

    assert "sk-" not in shown
    assert "X-Key" in shown
    assert "model='tiny'" in shown
