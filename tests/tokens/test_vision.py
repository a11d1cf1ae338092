"""Prompts with images: vLLM's ids, names and block digests; it is asked once about an image.

Images get the names that vLLM's own hasher gives them, or none.
"""

from __future__ import annotations

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from router.api.openai import ChatRequest, parse_chat
from router.api.responses import parse_responses
from router.base.contracts import HashContract, block_key
from router.base.engines import V0_33
from router.request import tokenize
from router.request.tokenize import MediaFinder
from router.tokens import NeedsEngine, Prompter, load_prompter
from router.tokens.conversation import JsonMemo, build_conversation
from router.tokens.encoder import text_of
from router.tokens.media import (
    MAX_URL_CHARS,
    MediaBook,
    MediaItem,
    MediaKind,
    data_of,
    has_media,
    media_items,
    media_key,
    name_of,
)
from tests.tokens.record_vision import BLOCK_SIZE, as_responses, bodies
from tests.tokens.vllm_routes import fingerprint
from tests.vision_model import data_url, image_part, make_vision_model, png

RECORDED = json.loads((Path(__file__).parent / "golden" / "vision.json").read_text())
PROMPTS = list(zip(bodies(3, 20), RECORDED["prompts"], strict=True))
CONTRACT = HashContract(algorithm="sha256", block_size=BLOCK_SIZE)


def image_ids() -> dict[str, list[int]]:
    """Say what the engine put in the place of each image."""
    found: dict[str, list[int]] = {}
    for body, prompt in PROMPTS:
        items = media_items(body["messages"])
        for item, (start, end) in zip(items, prompt["places"], strict=True):
            assert item.url is not None
            found[item.url] = prompt["ids"][start:end]
    return found


class FakeEngine:
    """Tokenizes a prompt of one image as the recorded engine did."""

    def __init__(self, prompter: Prompter) -> None:
        self.images = image_ids()
        self.num_asked = 0
        self.is_broken = False
        self._prompter = prompter

    async def ids_of(self, model: str, body: bytes) -> list[int] | None:
        self.num_asked += 1
        if self.is_broken:
            return None
        request = replace(parse_chat(orjson.loads(body)), shows_media=True)
        [item] = media_items(request.messages)
        assert item.url is not None
        before, behind = text_of(self._prompter.renderer.render(request)).split("<image>")
        return [*self.encoded(before), *self.images[item.url], *self.encoded(behind)]

    def encoded(self, text: str) -> list[int]:
        plan = self._prompter.plan_text(text, add_special_tokens=False)
        return self._prompter.commit(plan, plan.encode()).ids()


class Setup:
    """A prompter of the tiny model that sees, and what asks an engine about its images."""

    def __init__(self, directory: Path) -> None:
        model_id = RECORDED["model_id"]
        self.prompter = load_prompter(str(make_vision_model(directory)), model_id=model_id)
        self.engine = FakeEngine(self.prompter)
        self.threads = ThreadPoolExecutor(1)
        self.finder = MediaFinder(self.engine, self.threads)  # type: ignore[arg-type]

    @property
    def book(self) -> MediaBook:
        return self.prompter.media

    async def find(self, items: list[MediaItem], owner: str = "") -> list[Any]:
        return await self.finder.find("tiny", self.prompter, items, owner)

    async def find_all(self, items: list[MediaItem]) -> list[Any]:
        """Ask until all are known: a request learns a few new ones, one at least."""
        known: list[Any] = []
        while len(known) < len(items):
            num_before, known = len(known), await self.find(items)
            assert len(known) > num_before, "refused"
        return known

    def texts(self, body: dict[str, Any]) -> tuple[ChatRequest, list[str]]:
        request = replace(parse_chat(body), shows_media=True)
        return request, text_of(self.prompter.renderer.render(request)).split("<image>")


@pytest.fixture(name="setup")
def make_setup(tmp_path: Path) -> Setup:
    return Setup(tmp_path / "model")


async def test_prompts_are_vllms(setup: Setup) -> None:
    """Ids, names and digests of growing conversations; each image is asked about once."""
    urls = set()
    for body, prompt in PROMPTS:
        items = media_items(body["messages"])
        urls |= {(item.url, item.uuid) for item in items}
        known = await setup.find_all(items)
        request, texts = setup.texts(body)
        plan = setup.prompter.plan_media(request, texts, known)

        tokens = setup.prompter.commit(plan, plan.encode())

        assert [each.name for each in known] == prompt["names"]
        assert tokens.ids() == prompt["ids"]
        keys = [block_key(bytes.fromhex(digest)) for digest in prompt["digests"]]
        assert list(tokens.keys(CONTRACT)) == keys
        starts = [start for start, _ in prompt["places"]]
        assert tokens.num_before_media == min(starts, default=len(prompt["ids"]))
        full = tokens.digests(CONTRACT, range(len(keys)))
        assert [digest.hex()[-16:] for digest in full] == prompt["digests"]
    assert setup.engine.num_asked == len(urls)


async def test_prompts_of_responses_are_vllms(setup: Setup) -> None:
    """The same conversations by the Responses API, where images have no names of their clients."""
    for (body, _), recorded in zip(PROMPTS, RECORDED["responses"], strict=True):
        chat = replace(parse_responses(as_responses(body)), shows_media=True)
        items = media_items(chat.messages)
        known = await setup.find_all(items)
        texts = text_of(setup.prompter.renderer.render(chat)).split("<image>")
        plan = setup.prompter.plan_media(chat, texts, known)

        tokens = setup.prompter.commit(plan, plan.encode())

        assert chat.engine_only is None
        assert [each.name for each in known] == recorded["names"]
        assert fingerprint(tokens.ids()) == recorded["ids"]
        num_blocks = len(tokens.keys(CONTRACT))
        [last] = tokens.digests(CONTRACT, [num_blocks - 1])
        assert last.hex()[-16:] == recorded["last_digest"]


async def test_a_prompt_is_known_up_to_an_image_that_is_not(setup: Setup) -> None:
    """An address in the middle: what is in front of it has the engine's ids and blocks."""
    body, prompt = next((b, p) for b, p in PROMPTS if len(p["places"]) > 2)
    items = media_items(body["messages"])
    known = await setup.find([items[0], MediaItem("http://x/a.png", None), items[2]])
    request, texts = setup.texts(body)

    plan = setup.prompter.plan_media(request, texts[: len(known) + 1], known)
    tokens = setup.prompter.commit(plan, plan.encode())

    assert len(known) == 1
    assert tokens.ids() == prompt["ids"][: prompt["places"][1][0]]


async def test_an_image_is_remembered_for_its_owner(setup: Setup) -> None:
    """What one tenant sent makes no other tenant's prompt quicker."""
    items = media_items(PROMPTS[-1][0]["messages"])[:1]

    for owner in ("a", "b", "a"):
        assert await setup.find(items, owner)

    assert setup.engine.num_asked == 2


async def test_an_image_may_be_sent_by_its_name_alone(setup: Setup) -> None:
    """A `uuid` without an image means the one that came with it before."""
    item = media_items(PROMPTS[-1][0]["messages"])[0]._replace(uuid="mine")
    alone = MediaItem(None, "mine")

    unknown, known, again = [await setup.find([each]) for each in (alone, item, alone)]

    assert (unknown, known[0].name) == ([], "mine")
    assert again == known


async def test_an_engine_that_does_not_tell_is_not_asked_again(setup: Setup) -> None:
    """For a while: each prompt would wait for nothing."""
    items = media_items(PROMPTS[-1][0]["messages"])[:1]
    setup.engine.is_broken = True

    assert [await setup.find(items) for _ in range(3)] == [[], [], []]
    assert setup.engine.num_asked == 1


async def test_a_wrong_count_ends_images_for_a_while(setup: Setup) -> None:
    """Only images: prompts of text alone stay trusted."""
    items = media_items(PROMPTS[-1][0]["messages"])[:1]
    await setup.find(items)
    now_s = tokenize.monotonic()

    setup.book.observe_count(False, now_s)

    assert await setup.find(items) == []
    assert setup.book.is_off(now_s + 29)
    assert not setup.book.is_off(now_s + 31)
    assert setup.prompter.trust.reason is None


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url"},
        {"type": "image_url", "image_url": None},
        {"type": "image_url", "image_url": "data:x"},
        {"type": "image_url", "image_url": {"url": 7}},
        {"type": "image_url", "image_url": {"url": "x"}, "uuid": 7},
        {"type": "image_url", "image_url": {"url": "x"}, "uuid": ""},
        {"type": ["image_url"], "image_url": {"url": "x"}},
        {"type": "audio_url", "audio_url": {"url": "data:x"}},
        {"type": "input_audio", "input_audio": {"data": "eA==", "format": "wav"}, "uuid": "mine"},
        {"type": "video_url", "image_url": {"url": "x"}},
        {"type": "image_pil", "image_pil": {"url": "x"}},
        {"image_url": "data:x"},
        {},
    ],
    ids=json.dumps,
)
def test_other_media_are_for_the_engine(part: dict[str, Any]) -> None:
    """Sounds, and whatever is not exactly an image or a video as clients send it."""
    with pytest.raises(NeedsEngine):
        media_items([{"role": "user", "content": [part]}])


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.text(max_size=4)
    | st.sampled_from(["image_url", "audio_url", "input_audio", "video_url"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                "type image_url input_audio video_url data format url uuid text x".split()
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@pytest.mark.hypothesis
@given(st.lists(JSON, max_size=4))
def test_any_json_is_images_or_for_the_engine(content: list[Any]) -> None:
    """Whatever stands in a message's content."""
    messages = [{"role": "user", "content": content}]
    with suppress(NeedsEngine):
        items = media_items(messages)
        assert bool(items) == has_media(messages)
    with suppress(NeedsEngine):
        build_conversation(messages, "openai", JsonMemo(), shows_media=True)


def test_images_render_only_where_they_are_understood(setup: Setup) -> None:
    """Not without being asked for, in other messages, or with a field that the engine knows."""
    image = image_part(png(3, 2))
    asked = replace(parse_chat({"messages": [{"role": "user", "content": [image]}]}))

    with pytest.raises(NeedsEngine):
        setup.prompter.renderer.render(asked)
    assert "<image>" in text_of(setup.prompter.renderer.render(replace(asked, shows_media=True)))
    for role, part in (("system", image), ("assistant", image), ("user", {**image, "text": "t"})):
        body = {"messages": [{"role": role, "content": [part]}]}
        with pytest.raises(NeedsEngine):
            setup.prompter.renderer.render(replace(parse_chat(body), shows_media=True))


def test_models_without_a_token_for_images_have_no_book(tmp_path: Path) -> None:
    """Or with one that is no token of its own."""
    directory = make_vision_model(tmp_path / "model")
    config = json.loads((directory / "config.json").read_text())

    for token_id in (None, "8192", 5, 1 << 40, -1):
        (directory / "config.json").write_text(json.dumps({**config, "image_token_id": token_id}))
        assert not load_prompter(str(directory)).media.placeholders


def test_keys_differ_where_items_do() -> None:
    """By bytes, by a client's name, by owner, by kind."""
    items = [MediaItem(data_url(png(3, 2, seed)), uuid) for seed in (1, 2) for uuid in (None, "a")]

    keys = {media_key(item, owner) for item in items for owner in ("", "x")}

    assert len(keys) == 8
    assert len({media_key(item._replace(kind="video"), "") for item in items} | keys) == 12


VECTORS = json.loads((Path(__file__).parents[1] / "data" / "media_vectors.json").read_text())
MODEL = VECTORS["model"]
PNG = VECTORS["images"][0]


def named(data: bytes, kind: MediaKind = "image", model: str = MODEL) -> str | None:
    return name_of(MediaItem("data:", None, kind), data, model)


NAMED_BY_0_33 = {"tRNS": "01d8aa43d3662cc736635f4e3bbed30735a26eff4654b491ab1e72f74b3528a2"}
"""Names that differ there: recorded by its own hasher, as the vectors are."""


@pytest.mark.parametrize("image", VECTORS["images"], ids=lambda i: f"{i['form']}-{i['mode']}")
def test_images_are_named_as_by_0_33(image: dict[str, Any]) -> None:
    """A picture with a transparent colour is converted there; all others have their names."""
    item = MediaItem("data:", None)
    data = base64.b64decode(image["data"])

    name = name_of(item, data, VECTORS["model"], V0_33)

    named = NAMED_BY_0_33.get(image["mode"], image["identifier"])
    assert name == (None if image["form"] == "BMP" else named)


@pytest.mark.parametrize("image", VECTORS["images"], ids=lambda i: f"{i['form']}-{i['mode']}")
def test_an_image_has_the_engines_name(image: dict[str, Any]) -> None:
    """Of every format and mode it is vLLM's; of what is not certain there is none."""
    data = data_of(f"data:image/any;base64,{image['data']}")
    assert data is not None

    name = named(data)

    assert name == (None if image["form"] == "BMP" else image["identifier"])


def test_a_clients_own_name_is_the_name() -> None:
    """A `uuid` is taken as it is, whatever comes with it."""
    for kind in ("image", "video"):
        assert name_of(MediaItem("data:", "mine", kind), b"", MODEL) == "mine"


def test_the_model_is_part_of_the_name() -> None:
    """Two models name the same image differently."""
    data = base64.b64decode(PNG["data"])

    assert named(data) != named(data, model="another")


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org/a.png",
        "file:///etc/passwd",
        "data:image/png;base64",
        f"data:image/png,{PNG['data']}",
        f"data:image/png;base64;x=1,{PNG['data']}",
        f"data:image/png;base64,{PNG['data']}\n",
        "data:image/png;base64,%%%",
        "data:image/png;base64,ü",
        "data:image/png;base64," + "A" * MAX_URL_CHARS,
    ],
    ids=lambda url: url[:40],
)
def test_what_is_not_certain_has_no_bytes(url: str) -> None:
    """Addresses, what the engine refuses, and what is too large."""
    assert data_of(url) is None


@pytest.mark.hypothesis
@given(
    st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF0000WEBP", b"GIF89a"]),
    st.binary(max_size=64),
    st.sampled_from(["image", "video"]),
)
def test_any_bytes_have_a_name_or_none(head: bytes, rest: bytes, kind: MediaKind) -> None:
    """Broken pictures raise nothing."""
    name = named(head + rest, kind)

    assert name is None or len(name) == 64


def test_what_is_nothing_but_segments_ends() -> None:
    """Of a hostile one only the first are read."""
    data = b"\xff\xd8" + b"\xff\xe0\x00\x02" * 1_000_000

    assert named(data) is None
