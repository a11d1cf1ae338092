"""Fuzz: request bodies, whole or broken, on the way from bytes to tokens; and through a router."""

from __future__ import annotations

import datetime
import random
from typing import Any

import orjson
from hypothesis import strategies as st

from router.api.apis import CHAT, COMPLETIONS
from router.api.body import Outline, make_outline
from router.api.openai import ChatRequest, Limit, parse_chat, parse_completion
from router.api.responses import parse_responses
from router.base.errors import ClientError
from router.tokens import NeedsEngine
from router.tokens.encoder import Framed
from router.tokens.models.deepseek_v4 import DeepSeekV4Renderer, DeepSeekV41Renderer
from router.tokens.models.deepseek_v32 import DeepSeekV32Renderer
from router.tokens.models.harmony import HarmonyRenderer
from router.tokens.models.harmony_encoder import HarmonyEncoder
from tests.faults.stage import Engines, on_stage
from tests.fuzz.budget import fuzz
from tests.fuzz.values import NAMES, PROMPTER, TEXTS, VALUES

LIMIT = Limit(max_tokens=50, max_chars_per_token=PROMPTER.encoder.max_chars_per_token)
RENDERERS = [
    DeepSeekV32Renderer(),
    DeepSeekV4Renderer(),
    DeepSeekV41Renderer(),
    HarmonyRenderer(lambda: False),
]
for each in RENDERERS:
    each.today = lambda: datetime.date(2025, 6, 28)
HARMONY = HarmonyEncoder()
FIELDS = (
    "model messages tools tool_choice documents reasoning_effort add_generation_prompt "
    "continue_final_message add_special_tokens chat_template chat_template_kwargs cache_salt "
    "max_tokens max_completion_tokens n stream stream_options prompt suffix prompt_embeds "
    "truncate_prompt_tokens kv_transfer_params metadata prompt_cache_key priority logit_bias stop"
).split()
PARTS = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": TEXTS}), max_size=3)
FUNCTIONS = st.fixed_dictionaries(
    {"name": TEXTS}, optional={"parameters": VALUES, "arguments": TEXTS}
)
CALLS = st.lists(
    st.fixed_dictionaries({"id": TEXTS, "type": st.just("function"), "function": FUNCTIONS}),
    max_size=2,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer"]) | TEXTS},
        optional={"content": TEXTS | PARTS | VALUES, "tool_calls": CALLS | VALUES, "name": VALUES},
    ),
    max_size=4,
)
TOOLS = st.lists(
    st.fixed_dictionaries({"type": st.just("function"), "function": FUNCTIONS}), max_size=3
)
IDS = st.lists(st.integers(0, 2**32 + 5), max_size=40)
ITEMS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(
                "message reasoning function_call function_call_output custom_tool_call".split()
            ),
            "role": st.sampled_from(["user", "assistant", "system", "developer"]) | VALUES,
            "content": TEXTS | PARTS | VALUES,
            "call_id": st.sampled_from(["a", "b"]) | VALUES,
            "name": TEXTS,
            "arguments": TEXTS,
            "output": TEXTS | PARTS | VALUES,
            "status": st.sampled_from(["completed", "incomplete"]) | VALUES,
        },
    )
    | VALUES,
    max_size=4,
)
PROMPTS = TEXTS | IDS | st.lists(TEXTS | IDS, max_size=3) | VALUES
FREE = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=6)
BODIES = st.one_of(
    st.builds(
        lambda given, free: free | given,
        st.fixed_dictionaries({"input": ITEMS | TEXTS}, optional={"instructions": TEXTS | VALUES}),
        FREE,
    ),
    st.builds(
        lambda given, free: free | given,
        st.fixed_dictionaries({"messages": MESSAGES}, optional={"tools": TOOLS}),
        FREE,
    ),
    st.builds(lambda given, free: free | given, st.fixed_dictionaries({"prompt": PROMPTS}), FREE),
    FREE,
)


def written(body: Any, draw: random.Random) -> bytes:
    """Write a body as JSON; of three one is damaged somewhere."""
    try:
        data = bytearray(orjson.dumps(body))
    except TypeError:  # an integer beyond 64 bits, half a character: written by hand
        import json

        data = bytearray(json.dumps(body).encode())
    if draw.random() < 0.33:
        for _ in range(draw.randint(1, 4)):
            index = draw.randrange(len(data) + 1)
            data[index : index + draw.randint(0, 3)] = draw.choice(
                [b"", b"[", b"{", b'"', b"\\", b",", b"\xff", b"\x00", b"1e999", b"null", b'"":']
            )
    return bytes(data)


def outlined(data: bytes) -> Outline | None:
    """Outline a body; None: it is no JSON object."""
    try:
        return make_outline(data)
    except ValueError:
        return None


@fuzz(BODIES, st.randoms(use_true_random=False))
def test_a_body_is_tokens_or_an_error_of_the_clients(body: Any, draw: random.Random) -> None:
    """Never anything else: whole or outlined, as a chat and as a completion."""
    data = written(body, draw)
    outline = outlined(data)
    try:
        read = orjson.loads(data)
    except orjson.JSONDecodeError:
        return
    if not isinstance(read, dict):
        assert outline is None
        return
    for is_chat in (True, False):
        try:
            request = parse_chat(read) if is_chat else parse_completion(read)
            LIMIT.check(request)
            if isinstance(request, ChatRequest):
                plan = PROMPTER.plan_chat(request)
            else:
                plan = PROMPTER.plan_completion(request)
            tokens = PROMPTER.commit(plan, plan.encode())
            assert len(tokens.ids()) == tokens.num_tokens
        except (ClientError, NeedsEngine):
            pass
        for renderer in RENDERERS if is_chat else ():
            try:
                chat = parse_responses(read) if "input" in read else parse_chat(read)
                parts = renderer.render(chat)
                if isinstance(renderer, HarmonyRenderer):
                    framed = [each for each in parts if isinstance(each, Framed)]
                    assert HARMONY.encode(framed) == HARMONY.encode_whole(framed)
            except (ClientError, NeedsEngine):
                pass
        try:
            assert outline is not None
            (CHAT if is_chat else COMPLETIONS).outlined(outline)
        except ClientError:
            pass


async def test_a_router_answers_every_body() -> None:
    """On every API, in its own shape, and it is no internal error."""
    draw = random.Random(9)
    paths = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
    async with Engines(1) as engines, on_stage(*engines) as stage:
        for number in range(60):
            data = written(_any(draw, 4), draw)
            reply = await stage.ask(data, paths[number % 4])

            assert reply.status < 500 or reply.status == 501, (number, reply.body)
        assert stage.metric("warmroute_refused_total", code="internal_error") == 0
        assert "internal error" not in stage.log
        assert "prompt was not tokenized" not in stage.log


def _any(draw: random.Random, depth: int) -> Any:
    """Make a body at random, of fields that mean something."""
    if depth == 4:
        chosen = {draw.choice(FIELDS): _any(draw, 3) for _ in range(draw.randint(0, 5))}
        return chosen | {"model": "tiny", "messages": [{"role": "user", "content": _any(draw, 2)}]}
    kind = draw.randrange(7 if depth else 5)
    if kind == 5:
        return [_any(draw, depth - 1) for _ in range(draw.randint(0, 4))]
    if kind == 6:
        return {draw.choice(NAMES): _any(draw, depth - 1) for _ in range(draw.randint(0, 4))}
    return (None, True, draw.choice(NAMES), draw.choice((0, -1, 2**63, 1e300, 5)), "a b")[kind]
