"""Conversations with a running replica, most of them through the openai client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import httpx
import openai
import pytest
from transformers import AutoTokenizer

from loadtest.emulator.emulator import Emulator
from loadtest.emulator.options import TINY_MODEL, EmulatorOptions
from loadtest.engine_model.time_model import PRESETS

OPTIONS = EmulatorOptions(
    block_size=16,
    num_gpu_blocks=600,
    max_model_len=8192,
    time_model=PRESETS["instant"],
    loras=(("ad", "/adapters/ad"),),
)
CHAT = "/v1/chat/completions"
HELLO: list[Any] = [{"role": "user", "content": "hello there " * 40}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string"}},
                "required": ["path"],
            },
        },
    }
]


@pytest.fixture
async def replica() -> AsyncIterator[Emulator]:
    async with Emulator(OPTIONS) as replica:
        yield replica


@pytest.fixture
async def http(replica: Emulator) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=replica.url, timeout=30) as client:
        yield client


@pytest.fixture
async def client(replica: Emulator) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{replica.url}/v1", api_key="none", max_retries=0
    ) as client:
        yield client


async def test_an_answer_counts_what_the_cache_had(client: openai.AsyncOpenAI) -> None:
    """The second turn finds prompt and reply of the first, to the block."""
    first = await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=20)
    assert first.usage is not None
    reply = first.choices[0].message.content
    turn = [*HELLO, {"role": "assistant", "content": reply}, {"role": "user", "content": "go on"}]

    second = await client.chat.completions.create(model="tiny", messages=turn, max_tokens=5)

    assert (first.usage.completion_tokens, first.choices[0].finish_reason) == (20, "length")
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    held = first.usage.prompt_tokens + 19
    assert second.usage.prompt_tokens_details.cached_tokens == held // 16 * 16


async def test_a_stream_has_the_same_as_the_whole_answer(client: openai.AsyncOpenAI) -> None:
    """Role first, then text, the reason, and the usage that was asked for."""
    whole = await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=20)
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            model="tiny",
            messages=HELLO,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
    ]

    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    text = "".join(delta.content or "" for delta in deltas)
    assert text == whole.choices[0].message.content
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert (reasons[-1], set(reasons[:-1])) == ("length", {None})
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20


@pytest.mark.parametrize("stream", [False, True])
async def test_tool_calls_are_made_on_request(client: openai.AsyncOpenAI, stream: bool) -> None:
    """A forced call names the function and carries arguments that parse."""
    request: dict[str, Any] = {
        "model": "tiny",
        "messages": HELLO,
        "tools": TOOLS,
        "tool_choice": "required",
    }
    if stream:
        async with client.chat.completions.stream(**request) as events:
            choice: Any = (await events.get_final_completion()).choices[0]
    else:
        choice = (await client.chat.completions.create(**request)).choices[0]

    (call,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert call.function.name == "read_file"
    assert list(json.loads(call.function.arguments)) == ["path"]


@pytest.mark.parametrize(
    ("change", "calls"),
    [
        ({"emulator": {"tool_call": True}}, True),
        ({"emulator": {"tool_call": "read_file"}}, True),
        ({"emulator": {"tool_call": False}, "tool_choice": "auto"}, False),
        ({"tool_choice": {"type": "function", "function": {"name": "read_file"}}}, True),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, False),
        ({"tool_choice": "none", "emulator": {"tool_call": True}}, False),
        ({}, False),
    ],
)
async def test_who_decides_about_tool_calls(
    http: httpx.AsyncClient, change: dict[str, Any], calls: bool
) -> None:
    """The request's choice, then its extension field, then the configured ratio (0 here)."""
    body = {"messages": HELLO, "tools": TOOLS, "max_tokens": 300, **change}

    (choice,) = (await http.post(CHAT, json=body)).json()["choices"]

    assert ("tool_calls" in choice["message"]) == calls


async def test_a_share_of_requests_calls_tools_by_itself() -> None:
    """With a ratio, some prompts are answered by a call and some are not, each time the same."""
    options = EmulatorOptions(time_model=PRESETS["instant"], tool_call_ratio=0.5)
    async with Emulator(options) as replica, httpx.AsyncClient(base_url=replica.url) as http:
        reasons = []
        for number in [*range(12), *range(12)]:
            body = {"messages": [{"role": "user", "content": f"task {number}"}], "tools": TOOLS}
            answer = (await http.post(CHAT, json=body)).json()
            reasons.append(answer["choices"][0]["finish_reason"])

    assert reasons[:12] == reasons[12:]
    assert set(reasons) == {"tool_calls", "stop"}


async def test_completions_take_text_ids_and_lists(http: httpx.AsyncClient) -> None:
    """One choice per prompt and repetition, echoed and streamed where asked for."""
    reference = AutoTokenizer.from_pretrained(str(TINY_MODEL))
    text = "some words to complete"
    ids = reference.encode(text)

    async def complete(**body: Any) -> dict[str, Any]:
        answer = await http.post("/v1/completions", json={"model": "tiny", **body})
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    by_text = await complete(prompt=text)
    by_ids = await complete(prompt=ids, echo=True)
    several = await complete(prompt=[text, "other"], n=2, max_tokens=3)
    several_ids = await complete(prompt=[ids, ids[:2]], max_tokens=3, return_token_ids=True)

    assert by_text["usage"]["prompt_tokens"] == len(ids)
    assert by_text["usage"]["completion_tokens"] == 16
    assert by_ids["choices"][0]["text"] == text + by_text["choices"][0]["text"]
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert several["choices"][0]["text"] != several["choices"][1]["text"]
    assert several["usage"]["completion_tokens"] == 12
    assert several_ids["choices"][0]["prompt_token_ids"] == ids
    assert len(several_ids["choices"][1]["token_ids"]) == 3


async def test_a_completion_stream_reports_usage_as_it_goes(http: httpx.AsyncClient) -> None:
    """Every chunk counts with continuous stats; token ids come where asked for."""
    body = {
        "prompt": "a b c",
        "max_tokens": 6,
        "stream": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }

    text = (await http.post("/v1/completions", json=body)).text

    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line[6:]) for line in lines[:-2]]
    assert all("usage" in chunk for chunk in chunks)
    assert chunks[0]["choices"][0]["prompt_token_ids"] is not None
    ids = [id for chunk in chunks[:-1] for id in chunk["choices"][0]["token_ids"]]
    assert len(ids) == 6
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    assert "created_cache_tokens" not in chunks[-1]["usage"]["prompt_tokens_details"]


async def test_a_chat_stream_of_two_choices_with_continuous_usage(http: httpx.AsyncClient) -> None:
    """Both choices open with a role and end with a reason; another seed says another thing."""
    body = {
        "messages": HELLO,
        "max_tokens": 4,
        "n": 2,
        "seed": 5,
        "stream": True,
        "stream_options": {"continuous_usage_stats": True},
    }

    text = (await http.post(CHAT, json=body)).text

    chunks = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
    for index in (0, 1):
        mine = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["choices"][0]["delta"]["role"] == "assistant"
        assert mine[0]["usage"]["completion_tokens"] == 0
        assert mine[-1]["choices"][0]["finish_reason"] == "length"
        assert mine[-1]["system_fingerprint"]


async def test_the_body_can_ask_for_a_length_and_an_echo(http: httpx.AsyncClient) -> None:
    """The extension field `emulator` sets the natural length, or has the text said again."""
    short = await http.post(CHAT, json={"messages": HELLO, "emulator": {"reply_tokens": 3}})
    echo = await http.post(
        CHAT, json={"messages": [{"role": "user", "content": "abc"}], "emulator": {"echo": True}}
    )

    assert short.json()["usage"]["completion_tokens"] == 4
    assert echo.json()["choices"][0]["message"]["content"] == "abc"


async def test_tokenize_equals_transformers_and_render_equals_tokenize(
    http: httpx.AsyncClient,
) -> None:
    """The same ids from the reference, /tokenize, /render and usage."""
    reference = AutoTokenizer.from_pretrained(str(TINY_MODEL))
    expected = reference.apply_chat_template(
        HELLO, tokenize=True, add_generation_prompt=True, return_dict=False
    )

    tokens = (await http.post("/tokenize", json={"messages": HELLO})).json()
    rendered = (await http.post(f"{CHAT}/render", json={"messages": HELLO})).json()
    answer = (await http.post(CHAT, json={"messages": HELLO, "max_tokens": 1})).json()
    plain = (
        await http.post("/tokenize", json={"prompt": "Hello", "return_token_strs": True})
    ).json()
    completion = (await http.post("/v1/completions/render", json={"prompt": "Hello"})).json()
    back = (await http.post("/detokenize", json={"tokens": plain["tokens"]})).json()

    assert tokens["tokens"] == rendered["token_ids"] == expected
    assert tokens["count"] == answer["usage"]["prompt_tokens"] == len(expected)
    assert plain["token_strs"] == reference.convert_ids_to_tokens(plain["tokens"])
    assert completion[0]["token_ids"] == plain["tokens"]
    assert back == {"prompt": "Hello"}


async def test_an_adapter_and_a_salt_have_caches_of_their_own(http: httpx.AsyncClient) -> None:
    """The same prompt hits only within the same adapter and salt."""
    cached = []
    for change in ({}, {"model": "ad"}, {"cache_salt": "s"}, {"model": "ad"}, {"cache_salt": "s"}):
        body = {"messages": HELLO, "max_tokens": 1, **change}
        usage = (await http.post(CHAT, json=body)).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"] > 0)

    assert cached == [False, False, False, True, True]


async def test_small_routes(http: httpx.AsyncClient, replica: Emulator) -> None:
    """Models, version, load, sources and metrics look as the engine's."""
    models = (await http.get("/v1/models")).json()["data"]
    assert [(m["id"], m["root"], m["parent"]) for m in models] == [
        ("tiny", str(TINY_MODEL), None),
        ("ad", "/adapters/ad", "tiny"),
    ]
    assert models[0]["max_model_len"] == 8192
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        answer = await http.request(method, path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert (await http.get("/version")).json() == {"version": "0.32.0"}
    assert (await http.get("/load")).json() == {"server_load": 0}
    sources = (await http.get("/kv_event_sources")).json()
    assert sources["0"]["endpoint"].startswith("tcp://*:")
    await http.post(CHAT, json={"messages": HELLO, "max_tokens": 3})
    metrics = (await http.get("/metrics")).text
    assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in metrics
    assert 'block_size="16"' in metrics
    assert 'num_gpu_blocks="600"' in metrics
    assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"} 3.0' in metrics
    assert 'vllm:time_to_first_token_seconds_count{engine="0",model_name="tiny"} 1.0' in metrics
    assert 'vllm:inter_token_latency_seconds_count{engine="0",model_name="tiny"} 2.0' in metrics


async def test_request_ids_go_through_or_are_made(http: httpx.AsyncClient) -> None:
    """The client's id is in the header and the answer's id, streaming or not."""
    headers = {"X-Request-Id": "abc"}
    whole = await http.post(CHAT, json={"messages": HELLO, "max_tokens": 1}, headers=headers)
    stream = await http.post(
        CHAT, json={"messages": HELLO, "max_tokens": 1, "stream": True}, headers=headers
    )

    assert whole.json()["id"] == "chatcmpl-abc"
    assert whole.headers["x-request-id"] == stream.headers["x-request-id"] == "abc"
    assert '"id":"chatcmpl-abc"' in stream.text
    assert len((await http.get("/health")).headers["x-request-id"]) == 32


CLIENT = "BadRequestError"
INVALID = "Bad Request"
COMPLETIONS = "/v1/completions"


@pytest.mark.parametrize(
    ("path", "body", "status", "type_", "param", "words"),
    [
        (CHAT, {}, 400, INVALID, "body.messages", "Field required"),
        (CHAT, {"messages": "x"}, 400, INVALID, "body.messages", "valid list"),
        (CHAT, {"messages": []}, 400, CLIENT, None, "empty conversation"),
        (CHAT, {"messages": [{"role": "odd"}]}, 400, CLIENT, None, "unknown role"),
        (CHAT, [1], 400, INVALID, "body", "valid dictionary"),
        (CHAT, {"messages": HELLO, "max_tokens": "x"}, 400, INVALID, "body.max_tokens", "integer"),
        (CHAT, {"messages": HELLO, "max_tokens": 0}, 400, CLIENT, "max_tokens", "at least 1"),
        (CHAT, {"messages": HELLO, "max_tokens": 9999}, 400, CLIENT, "max_tokens", "greater"),
        (CHAT, {"messages": HELLO, "temperature": -1}, 400, CLIENT, "temperature", "negative"),
        (CHAT, {"messages": HELLO, "n": 0}, 400, CLIENT, "n", "at least 1"),
        (CHAT, {"messages": HELLO, "n": 2, "temperature": 0}, 400, CLIENT, None, "greedy"),
        (CHAT, {"messages": HELLO, "cache_salt": ""}, 400, CLIENT, "cache_salt", "non-empty"),
        (CHAT, {"messages": HELLO, "stream_options": {"x": 1}}, 400, CLIENT, "stream_options", ""),
        (CHAT, {"model": "nope"}, 404, "NotFoundError", "model", "does not exist"),
        (COMPLETIONS, {"prompt": [5] * 9000}, 400, CLIENT, "input_tokens", "9000 input"),
        (COMPLETIONS, {"prompt": [5] * 8192}, 400, CLIENT, "max_tokens", "got 0"),
        (COMPLETIONS, {"prompt": [99999]}, 400, CLIENT, None, "vocabulary"),
        (COMPLETIONS, {"prompt": [[1], ["x"]]}, 400, CLIENT, "prompt", "non-empty"),
        (COMPLETIONS, {}, 400, CLIENT, "prompt", "non-empty"),
        ("/tokenize", {}, 400, INVALID, "body.prompt", "Field required"),
        ("/detokenize", {}, 400, INVALID, "body.tokens", "Field required"),
        ("/emulator/faults", {"kind": "nonsense"}, 400, CLIENT, None, "not a fault"),
    ],
)
async def test_an_error_has_the_shape_of_the_engines(
    http: httpx.AsyncClient,
    path: str,
    body: Any,
    status: int,
    type_: str,
    param: str | None,
    words: str,
) -> None:
    """Status, type and parameter as recorded from vLLM, and a message."""
    answer = await http.post(path, json=body)

    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (status, status)
    assert (error["type"], error["param"]) == (type_, param)
    assert words in error["message"]


async def test_what_is_not_http_json_or_a_route_is_refused(http: httpx.AsyncClient) -> None:
    """Broken JSON, another content type, unknown paths and methods."""
    broken = await http.post(CHAT, content=b"{", headers={"content-type": "application/json"})
    typed = await http.post(CHAT, content=b"{}", headers={"content-type": "text/plain"})

    assert broken.status_code == 400
    assert "JSON decode error" in broken.json()["error"]["message"]
    assert "Unsupported Media Type" in typed.json()["error"]["message"]
    assert (await http.get("/nowhere")).status_code == 404
    not_allowed = await http.get(CHAT)
    assert (not_allowed.status_code, not_allowed.headers["allow"]) == (405, "POST")


async def test_a_client_that_goes_frees_its_blocks() -> None:
    """Disconnecting in mid-stream aborts the request; nothing runs, no block is held."""
    options = EmulatorOptions(block_size=16, num_gpu_blocks=600)
    async with Emulator(options) as replica, aiohttp.ClientSession(replica.url) as session:
        body = {"messages": HELLO, "max_tokens": 5000, "ignore_eos": True, "stream": True}
        async with session.post(CHAT, json=body) as answer:
            await answer.content.readline()
            engine = replica.replica.ranks[0].engine
            assert engine.num_requests == 1
            answer.close()
        while engine.num_requests:
            async with session.get("/load") as load:
                await load.read()

        assert engine.blocks.usage == 0.0
        async with session.get("/load") as load:
            assert await load.json() == {"server_load": 0}
        async with session.get("/metrics") as metrics:
            assert 'finished_reason="abort",model_name="tiny"} 1.0' in await metrics.text()


async def test_ranks_have_caches_and_events_of_their_own() -> None:
    """A rank is chosen by header; without one the least loaded is; unknown ones are refused."""
    options = EmulatorOptions(time_model=PRESETS["instant"], data_parallel_size=2)
    async with Emulator(options) as replica, httpx.AsyncClient(base_url=replica.url) as http:
        body = {"messages": HELLO, "max_tokens": 1}

        async def cached(rank: str) -> int:
            answer = await http.post(CHAT, json=body, headers={"X-data-parallel-rank": rank})
            return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert [await cached("1"), await cached("0")] == [0, 0]
        held = await cached("1")
        assert held > 0
        assert await cached("nonsense") == held
        refused = await http.post(CHAT, json=body, headers={"X-data-parallel-rank": "2"})
        assert refused.json()["error"]["message"] == (
            "data_parallel_rank 2 is out of range [0, 2)."
        )
        sources = (await http.get("/kv_event_sources")).json()
        assert len({source["endpoint"] for source in sources.values()}) == 2


async def test_the_least_loaded_rank_is_taken() -> None:
    """While one rank is busy the next request goes to the other."""
    options = EmulatorOptions(data_parallel_size=2)
    async with Emulator(options) as replica, aiohttp.ClientSession(replica.url) as session:
        body = {"messages": HELLO, "max_tokens": 1000, "ignore_eos": True, "stream": True}
        async with session.post(CHAT, json=body) as first:
            await first.content.readline()
            async with session.post(CHAT, json=body) as second:
                await second.content.readline()
                loads = [rank.load for rank in replica.replica.ranks]

    assert loads == [1, 1]


async def test_without_prefix_caching_nothing_is_reused() -> None:
    """Same prompt, no hit, no event."""
    options = EmulatorOptions(time_model=PRESETS["instant"], enable_prefix_caching=False)
    async with Emulator(options) as replica, httpx.AsyncClient(base_url=replica.url) as http:
        for _ in range(2):
            answer = await http.post(CHAT, json={"messages": HELLO, "max_tokens": 40})
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        publisher = replica.replica.ranks[0].publisher
        assert publisher is not None
        assert publisher.next_sequence == 0
