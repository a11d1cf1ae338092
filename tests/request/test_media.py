"""router.request: prompts with media, from the request to the audit; a model that sees."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from aiohttp import web

from router.api.openai import parse_chat
from router.tokens import Prompter, load_prompter
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import SECRET, Json, Stage, on_stage
from tests.vision_model import image_part, make_vision_model, png

PLACEHOLDER, TOKEN_ID = "<image>", 8192


class SeeingEngine(FakeEngine):
    """Counts a prompt's tokens; an item is 18, and `adds` more in an answer's count."""

    def __init__(self, directory: Path) -> None:
        super().__init__(self._answer)
        self.tokenizes = True
        self.pages["/v1/models"] = {
            "object": "list",
            "data": [{"id": "tiny", "object": "model", "root": str(directory)}],
        }
        self.prompter: Prompter = load_prompter(str(directory))
        self.adds = 0
        self.num_asked = 0

    def ids(self, body: Json) -> list[int]:
        """Make a prompt: its text, and an image in each placeholder's place."""
        texts = []
        for message in body["messages"]:
            texts += [part.get("text", PLACEHOLDER) for part in message["content"]]
        shown = {"messages": [{"role": "user", "content": "".join(texts)}]}
        plan = self.prompter.plan_chat(parse_chat(shown))
        made: list[int] = []
        for token in self.prompter.commit(plan, plan.encode()).ids():
            made += [8193, *[token] * 16, 8193] if token == TOKEN_ID else [token]
        return made

    @property
    def seen(self) -> list[Json]:
        """Return what came with media: the router's comparison of ids has none."""
        return [body for each in self.received if self._has_media(body := orjson.loads(each.body))]

    @staticmethod
    def _has_media(body: Json) -> bool:
        contents = [message["content"] for message in body.get("messages", ())]
        parts = [part for each in contents if isinstance(each, list) for part in each]
        return any(part["type"] != "text" for part in parts)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        if request.path == "/tokenize":
            self.num_asked += self._has_media(body)  # not the comparison of ids
            return web.json_response({"tokens": self.ids(body)})
        num_tokens = len(self.ids(body)) + self.adds
        return web.json_response(
            {
                "object": "chat.completion",
                "choices": [{"index": 0, "message": {"role": "assistant", "content": "ok"}}],
                "usage": {"prompt_tokens": num_tokens},
            }
        )


@asynccontextmanager
async def seeing(
    directory: Path,
) -> AsyncIterator[tuple[SeeingEngine, Stage]]:
    model = make_vision_model(directory)
    async with SeeingEngine(model) as engine, on_stage(engine) as stage:
        yield engine, stage


def show(*parts: Json, text: str = "Look. ") -> Json:
    """Ask about pictures."""
    content = [{"type": "text", "text": f"{SECRET} {text}" * 20}, *parts]
    return {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 4}


def ways(stage: Stage) -> dict[str, float]:
    """Count the prompts with images by how they were made."""
    names = ("media", "prefix", "engine", "local")
    found = {way: stage.metric("warmroute_tokenized_requests_total", way=way) for way in names}
    return {way: count for way, count in found.items() if count}


async def test_an_image_is_asked_about_once(tmp_path: Path) -> None:
    """Then its prompts are made here; the engine's count confirms them."""
    async with seeing(tmp_path) as (engine, stage):
        one, other = image_part(png(3, 2, 1)), image_part(png(3, 2, 2))
        for body in (show(one), show(one), show(one, other), show(one, other)):
            assert (await stage.ask(body)).status == 200

        assert engine.num_asked == 2
        assert ways(stage) == {"media": 4}
        assert not stage.metric("warmroute_token_mismatches_total")


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/a.png", "data:image/png;base64,%%%"])
async def test_what_is_not_known_ends_a_prompt(tmp_path: Path, url: str) -> None:
    """No engine is asked, nothing is fetched; the body goes on as it came."""
    async with seeing(tmp_path) as (engine, stage):
        body = show({"type": "image_url", "image_url": {"url": url}}, text="a")
        reply = await stage.ask(body)

        assert reply.status == 200
        assert engine.seen == [body]
        assert ways(stage) == {"prefix": 1}
        assert stage.metric("warmroute_needs_engine_total", why="image") == 1


AUDIO: Json = {"type": "audio_url", "audio_url": {"url": "http://127.0.0.1:1/a.wav"}}


@pytest.mark.parametrize("part", [AUDIO, {"type": "input_audio", "input_audio": {"data": ""}}])
async def test_other_media_end_a_prompt_before_their_message(tmp_path: Path, part: Json) -> None:
    """No engine is asked, which would fetch and decode them, and once more for the answer."""
    async with seeing(tmp_path) as (engine, stage):
        said = {"type": "text", "text": f"{SECRET} What was said before. " * 60}
        body = show(image_part(png(3, 2)), part)
        body["messages"].insert(0, {"role": "user", "content": [said]})
        assert (await stage.ask(body)).status == 200
        num_tokens = (await stage.admin("/admin/explain", body)).json()["num_tokens"]

        assert engine.seen == [body]
        assert engine.num_asked == 0
        assert ways(stage) == {"prefix": 2}, "explained, too"
        assert stage.metric("warmroute_needs_engine_total", why="multimodal") == 2
        assert num_tokens > 1_000, "estimated: the media may be long"


async def test_a_conversation_with_sound_stays_at_its_replica(tmp_path: Path) -> None:
    """Its session's last one; nothing is predicted, and so nothing is audited."""
    model = make_vision_model(tmp_path)
    async with SeeingEngine(model) as one, SeeingEngine(model) as two, on_stage(one, two) as stage:
        body, homes = show(AUDIO), []
        for turn in range(4):
            reply = await stage.ask(body, headers={"X-Session-ID": "heard"})
            homes.append(reply.headers["x-warmroute-replica"])
            if turn:
                assert "x-warmroute-cached" not in reply.headers
            body["messages"] = [*body["messages"], *show(text="And?")["messages"]]
        num_exact = stage.metric("warmroute_audited_total", result="exact")

    assert len(set(homes)) == 1
    assert not num_exact


async def test_a_wrong_count_ends_images_but_not_text(tmp_path: Path) -> None:
    """For a while; the next prompt is known up to its image."""
    async with seeing(tmp_path) as (engine, stage):
        body = show(image_part(png(3, 2)))
        engine.adds = 1
        await stage.ask(body)
        engine.adds = 0
        await stage.ask(body)
        await stage.ask(show())

        assert ways(stage) == {"media": 1, "prefix": 1, "local": 1}
        assert stage.metric("warmroute_token_mismatches_total", against="media") == 1


async def test_a_client_that_names_two_images_alike_ends_nothing(tmp_path: Path) -> None:
    """Its counts are its own."""
    async with seeing(tmp_path) as (engine, stage):
        engine.adds = 1
        await stage.ask(show(image_part(png(3, 2, 1), uuid="mine")))
        engine.adds = 0
        await stage.ask(show(image_part(png(3, 2, 2))))

        assert ways(stage) == {"media": 2}


async def test_a_clients_own_placeholder_ends_a_prompt(tmp_path: Path) -> None:
    """Where the engine would put the image is not certain any more."""
    async with seeing(tmp_path) as (engine, stage):
        await stage.ask(show(image_part(png(3, 2)), text="<image>"))

        assert ways(stage) == {"prefix": 1}
        assert engine.num_asked == 0


async def test_hostile_parts_get_the_engines_answer(tmp_path: Path) -> None:
    """The engine refuses each of them itself."""
    parts: list[Any] = [
        {"type": "image_url"},
        {"type": "image_url", "image_url": 7},
        {"type": {}, "image_url": {"url": "x"}},
        {"type": "video_url", "video_url": {"url": "x"}},
        {},
        7,
    ]
    async with seeing(tmp_path) as (engine, stage):
        engine.on_request = _refuse
        for part in parts:
            assert (await stage.ask(show(part))).status == 400, part


async def test_thousands_of_images_take_no_longer(tmp_path: Path) -> None:
    """Only the first few that are new are asked about."""
    async with seeing(tmp_path) as (engine, stage):
        parts = [image_part(png(3, 2, seed)) for seed in range(900)]
        await stage.ask(show(*parts))

        assert engine.num_asked == 4
        assert ways(stage) == {"prefix": 1}


async def _refuse(_: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "no such part"}}, status=400)
