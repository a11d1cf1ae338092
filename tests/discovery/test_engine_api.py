"""router.discovery.engine_api against servers that report much, little, or nonsense."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from router.base.errors import (
    BadRequest,
    HostUnknown,
    UpstreamBroken,
    UpstreamTimeout,
    UpstreamUnreachable,
)
from router.config.hosts import HostRules
from router.discovery import engine_pages
from router.discovery import engine_pages as engine_metrics
from router.discovery.engine_api import EngineApi
from router.discovery.engine_pages import EventSource, ServerInfo
from router.replicas import ServedModel
from router.replicas.registry import EngineKey
from tests.conftest import Serve
from tests.discovery.pages import METRICS, MODELS, SOURCES
from tests.ports import free_port

# As vLLM 0.32.0 writes it, shortened.

Replica = Callable[[dict[str, object]], Awaitable[str]]


@pytest.fixture
def replica(serve: Serve) -> Replica:
    """Serve fixed answers by path; gives the base URL. A tuple is (status, text)."""

    async def start(pages: dict[str, object]) -> str:
        async def handler(request: web.Request) -> web.Response:
            page = pages.get(request.path, (404, "not found"))
            if isinstance(page, tuple):
                return web.Response(status=page[0], text=page[1])
            return web.json_response(page)

        return await serve(handler)

    return start


@pytest.fixture
async def api() -> AsyncIterator[EngineApi]:
    """A client with a short deadline."""
    async with EngineApi(timeout_s=2) as client:
        yield client


async def test_a_vllm_replica_reports_everything(replica: Replica, api: EngineApi) -> None:
    url = await replica(
        {
            "/v1/models": MODELS,
            "/version": {"version": "0.32.0"},
            "/kv_event_sources": SOURCES,
            "/metrics": (200, METRICS),
        }
    )

    facts = await api.facts("r1", url)
    load = await api.load("r1", url)

    assert facts.models == (ServedModel(id="tiny", root="/models/tiny", max_model_len=4096),)
    assert (facts.version, facts.block_size, facts.num_gpu_blocks) == ("0.32.0", 32, 600)
    assert (facts.prefix_caching, facts.num_ranks) == (True, 2)
    assert facts.kv_dtype == "fp8"
    assert facts.event_sources == {
        0: EventSource("tcp://*:5557"),
        1: EventSource("tcp://*:5558", topic="kv"),
    }
    assert load is not None
    assert load.started_s == facts.started_s == 1795163824.78
    assert {rank: (each.num_running, each.num_waiting) for rank, each in load.ranks.items()} == {
        0: (3, 1),
        1: (4, 0),
    }


async def test_a_server_of_some_ranks_of_a_group_numbers_them_from_0(
    replica: Replica, api: EngineApi
) -> None:
    metrics = METRICS.replace('engine="0"', 'engine="4"').replace('engine="1"', 'engine="5"')
    url = await replica(
        {
            "/v1/models": MODELS,
            "/kv_event_sources": {"5": SOURCES["1"], "4": SOURCES["0"]},
            "/metrics": (200, metrics),
        }
    )

    facts = await api.facts("r1", url)
    load = await api.load("r1", url, names_sources=True)

    assert (facts.num_ranks, facts.rank_numbers, facts.names_sources) == (2, (4, 5), True)
    assert facts.event_sources[0].endpoint == "tcp://*:5557"
    assert facts.event_sources[1].endpoint == "tcp://*:5558"
    assert load is not None
    assert load.rank_numbers == (4, 5)
    assert {rank: (each.num_running, each.num_waiting) for rank, each in load.ranks.items()} == {
        0: (3, 1),
        1: (4, 0),
    }


async def test_a_server_that_reports_little_is_served_with_less(
    replica: Replica, api: EngineApi
) -> None:
    url = await replica({"/v1/models": MODELS, "/version": (200, "x"), "/kv_event_sources": [1]})

    facts = await api.facts("r1", url)

    assert facts.models[0].id == "tiny"
    assert (facts.version, facts.block_size, facts.num_gpu_blocks, facts.started_s) == (None,) * 4
    assert (facts.num_ranks, facts.event_sources) == (1, {})
    assert await api.load("r1", url) is None


async def info_of(replica: Replica, api: EngineApi, page: object) -> ServerInfo:
    info = await api.server_info("r1", await replica({"/server_info": page}), timeout_s=60)
    assert info is not None
    return info


_STORE = 'vllm:mooncake_store_put_total{engine="0"} 1.0\n'
_FETCH = 'vllm:num_requests_kv_fetch_by_stage{engine="0",stage="in_progress"} 0.0\n'


@pytest.mark.parametrize(
    ("version", "metrics", "seems"),
    [
        ("0.32.0", _STORE, "prefill"),
        ("0.33.1.dev3", _STORE, "prefill"),
        ("0.32.0", _STORE + _FETCH, None),
        ("0.32.0", "", None),
        ("0.31.2", _STORE, None),
        ("main", _STORE, None),
    ],
)
async def test_a_connector_that_loads_nothing_is_a_producer_s(
    replica: Replica, api: EngineApi, version: str, metrics: str, seems: str | None
) -> None:
    pages = {"/v1/models": MODELS, "/version": {"version": version}, "/metrics": (200, metrics)}

    assert (await api.facts("r1", await replica(pages))).seems == seems


@pytest.mark.parametrize(
    ("page", "role"),
    [
        ({"vllm_config": {"kv_transfer_config": {"kv_role": "kv_producer"}}}, "prefill"),
        ({"vllm_config": {"kv_transfer_config": {"kv_role": "kv_consumer"}}}, "decode"),
        ({"vllm_config": {"kv_transfer_config": {"kv_role": "kv_both"}}}, "both"),
        ({"vllm_config": {"kv_transfer_config": {"kv_role": "kv_odd"}}}, None),
        ({"vllm_config": {"kv_transfer_config": None}}, None),
        ({"vllm_config": "text"}, None),
        ((404, "no"), None),
    ],
)
async def test_an_engine_in_dev_mode_says_its_role(
    replica: Replica, api: EngineApi, page: object, role: str | None
) -> None:
    info = await info_of(replica, api, page)
    assert (info.role, bool(info.eagle)) == (role, False)


@pytest.mark.parametrize(
    ("speculation", "eagle"),
    [
        (None, False),
        ({"method": "ngram"}, False),
        ({"method": "eagle3", "num_speculative_tokens": 3}, True),
        ({"method": "mtp", "disable_eagle_block_drop": False}, True),
        ({"method": "mtp", "disable_eagle_block_drop": True}, False),
        ({"method": "dflash"}, True),
        ({"method": "dflash", "disable_lookahead_block_hashes": False}, False),
        ({"method": "dspark", "disable_lookahead_block_hashes": True}, False),
        ({"method": "mtp", "disable_lookahead_block_hashes": False}, False),
        ({"method": "mtp", "disable_lookahead_block_hashes": True}, True),
    ],
)
async def test_a_developer_s_page_shows_whether_the_last_block_is_dropped(
    replica: Replica, api: EngineApi, speculation: dict[str, object] | None, eagle: bool
) -> None:
    page = {"vllm_config": {"speculative_config": speculation}}

    info = await info_of(replica, api, page)
    assert info.eagle is eagle


async def test_with_a_connector_an_engine_of_0_33_drops_the_last_block(
    replica: Replica, api: EngineApi
) -> None:
    speculation = {"method": "eagle3", "disable_lookahead_block_hashes": False}
    transfer = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}
    page = {"vllm_config": {"speculative_config": speculation, "kv_transfer_config": transfer}}

    info = await info_of(replica, api, page)
    assert info.eagle is True


async def test_several_connectors_are_taken_one_by_one(replica: Replica, api: EngineApi) -> None:
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "connectors": [
                {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"},
                {"kv_connector": "NixlConnector", "kv_role": "kv_producer"},
                {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"},
            ]
        },
    }
    one = {"kv_connector": "MooncakeConnector", "kv_role": "kv_consumer"}
    other = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}

    found = [
        await api.server_info(
            "r1", await replica({"/server_info": {"vllm_config": config}}), timeout_s=60
        )
        for config in ({"kv_transfer_config": each} for each in (several, one, other))
    ]

    assert [(info.role, info.transfers) for info in found if info] == [
        ("prefill", ("nixl", "store")),
        ("decode", ("mooncake",)),
        ("both", ()),
    ]


# As vLLM 0.32.0 (CPU build, `--quantization int8_per_channel_weight_only`) writes it, shortened.
MODEL_CONFIG = {
    "model": "/models/tiny_model/",
    "quantization": "int8_per_channel_weight_only",
    "quantization_config": {"linear": None, "moe": {"weight": {"dtype": "torch.int8"}}},
    "dtype": "torch.bfloat16",
    "revision": None,
}
STORE = {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    ("changes", "weights"),
    [
        ({}, ("int8_per_channel_weight_only", "bfloat16", "main")),
        ({"quantization": None, "dtype": "torch.float16"}, ("none", "float16", "main")),
        ({"quantization": "gptq_marlin"}, ("gptq", "bfloat16", "main")),
        ({"quantization": "auto_gptq", "revision": "v2"}, ("gptq", "bfloat16", "v2")),
    ],
)
async def test_an_engine_in_dev_mode_says_which_weights_it_has(
    replica: Replica, api: EngineApi, changes: dict[str, object], weights: tuple[str, ...]
) -> None:
    page = {"vllm_config": {"model_config": MODEL_CONFIG | changes}}

    info = await info_of(replica, api, page)
    assert info.weights == dict(zip(("quantization", "dtype", "revision"), weights, strict=True))
    assert info.key_head is None


async def test_a_developer_s_page_that_does_not_come_is_told_apart(
    serve: Serve, api: EngineApi
) -> None:
    async def hang(request: web.Request) -> web.Response:
        await asyncio.sleep(3600)
        raise AssertionError

    assert await api.server_info("r1", await serve(hang), timeout_s=0.5) is None


@pytest.mark.parametrize(
    ("transfer", "head"),
    [
        (STORE, "tiny_model"),
        (STORE | {"kv_connector_extra_config": {}}, "tiny_model"),
        (STORE | {"kv_connector_extra_config": {"cache_prefix": "int8"}}, "int8@tiny_model"),
        (STORE | {"kv_connector_extra_config": {"cache_prefix": 8}}, "8@tiny_model"),
        (STORE | {"kv_connector": "NixlConnector"}, None),
        (
            {
                "kv_connector": "MultiConnector",
                "kv_connector_extra_config": {
                    "cache_prefix": "not its own",
                    "connectors": [
                        {"kv_connector": "NixlConnector"},
                        STORE | {"kv_connector_extra_config": {"cache_prefix": "a"}},
                    ],
                },
            },
            "a@tiny_model",
        ),
    ],
)
async def test_an_engine_in_dev_mode_says_how_its_keys_begin(
    replica: Replica, api: EngineApi, transfer: dict[str, object], head: str | None
) -> None:
    page = {"vllm_config": {"model_config": MODEL_CONFIG, "kv_transfer_config": transfer}}

    info = await info_of(replica, api, page)
    assert info.key_head == head


@pytest.mark.parametrize(("label", "tokens"), [("18432", 18432), ("None", None), ("0", None)])
async def test_an_engine_counts_its_cache_in_tokens_itself(
    replica: Replica, api: EngineApi, label: str, tokens: int | None
) -> None:
    metrics = METRICS.replace("num_gpu_blocks=", f'kv_cache_size_tokens="{label}",num_gpu_blocks=')
    pages = {"/v1/models": MODELS, "/metrics": (200, metrics)}

    assert (await api.facts("r1", await replica(pages))).num_cache_tokens == tokens


async def test_a_load_has_kv_usage_and_inter_token_latencies(
    replica: Replica, api: EngineApi
) -> None:
    metrics = METRICS + (
        'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25\n'
        'vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} NaN\n'
        'vllm:inter_token_latency_seconds_bucket{engine="0",le="0.01",model_name="tiny"} 4.0\n'
        'vllm:inter_token_latency_seconds_count{engine="0",model_name="tiny"} 40.0\n'
        'vllm:inter_token_latency_seconds_sum{engine="0",model_name="tiny"} 1.5\n'
        'vllm:inter_token_latency_seconds_sum{engine="1",model_name="tiny"} -1.5\n'
    )

    load = await api.load("r1", await replica({"/metrics": (200, metrics)}))

    assert load is not None
    assert {
        rank: (each.kv_usage, each.token_s, each.num_tokens) for rank, each in load.ranks.items()
    } == {0: (0.25, 1.5, 40), 1: (None, 0.0, 0)}


async def test_metrics_show_that_an_engine_speculates(replica: Replica, api: EngineApi) -> None:
    counters = 'vllm:spec_decode_num_drafts_total{engine="0",model_name="tiny"} 0.0\n'
    pages = {"/v1/models": MODELS}

    plain = await api.facts("r1", await replica(pages | {"/metrics": (200, METRICS)}))
    drafts = await api.facts("r1", await replica(pages | {"/metrics": (200, METRICS + counters)}))

    assert (plain.speculates, drafts.speculates) == (False, True)


async def test_a_bootstrap_server_names_its_engines(replica: Replica, api: EngineApi) -> None:
    page = {"0": {"engine_id": "e0", "worker_addr": {}}, "1": {"engine_id": "e1"}}

    assert await api.engine_ids("r1", await replica({"/query": page})) == {0: "e0", 1: "e1"}


@pytest.mark.parametrize("page", [(404, "no"), (200, "[]"), {"0": {}}, {"x": {"engine_id": "e"}}])
async def test_an_unrelated_bootstrap_server_is_an_error(
    replica: Replica, api: EngineApi, page: object
) -> None:
    url = await replica({"/query": page})

    with pytest.raises(UpstreamBroken, match="/query answered"):
        await api.engine_ids("r1", url)


@pytest.mark.parametrize("page", [(200, "<html>"), (404, "no"), {"data": []}, {"models": 1}])
async def test_a_server_that_is_no_engine_is_named(
    replica: Replica, api: EngineApi, page: object
) -> None:
    url = await replica({"/v1/models": page})

    with pytest.raises(UpstreamBroken, match="/v1/models"):
        await api.facts("r1", url)


async def test_an_engine_with_a_key_is_asked_with_it(serve: Serve, api: EngineApi) -> None:
    async def handler(request: web.Request) -> web.Response:
        is_known = request.headers.get("Authorization") == "Bearer sesame"
        return web.json_response(MODELS if is_known else {}, status=200 if is_known else 401)

    url = await serve(handler)
    nowhere = HostRules(())
    keys = [
        EngineKey("sesame", [url + "/"], nowhere),
        EngineKey("sesame", [], HostRules(["loopback"])),
        EngineKey("sesame", ["http://127.0.0.1:9"], nowhere),
    ]
    configured, by_host, other = [EngineApi(timeout_s=2, key=key) for key in keys]
    async with configured, by_host, other:
        for without in (api, other):
            with pytest.raises(UpstreamBroken, match=r"401.*engine\.api_key_file"):
                await without.facts("r1", url)
        found = [(await client.facts("r1", url)).models[0].id for client in (configured, by_host)]

    assert found == ["tiny", "tiny"]


async def test_health_is_the_engines_own_word(replica: Replica, api: EngineApi) -> None:
    await api.ping("r1", await replica({"/health": (200, "")}))
    with pytest.raises(UpstreamBroken, match="503"):
        await api.ping("r1", await replica({"/health": (503, "")}))


async def test_a_prompt_the_engine_refuses_is_the_clients_fault(
    replica: Replica, api: EngineApi
) -> None:
    refusal = json.dumps({"error": {"message": "bad role", "code": 400}})

    with pytest.raises(BadRequest, match="bad role"):
        await api.tokenize("r1", await replica({"/tokenize": (400, refusal)}), b"", timeout_s=1)
    with pytest.raises(BadRequest, match="no reason given"):
        await api.tokenize("r1", await replica({"/tokenize": (422, "x")}), b"", timeout_s=1)
    with pytest.raises(UpstreamBroken, match="500"):
        await api.tokenize("r1", await replica({"/tokenize": (500, "x")}), b"", timeout_s=1)


async def test_a_connection_cut_as_it_is_made_is_a_broken_replica(api: EngineApi) -> None:
    begun = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"
    for sent in (b"", b"HTTP/1.1 2", begun, b"SSH-2.0-x\r\n"):

        async def cut(
            _: asyncio.StreamReader, out: asyncio.StreamWriter, sent: bytes = sent
        ) -> None:
            out.write(sent)
            out.close()

        async with await asyncio.start_server(cut, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(UpstreamBroken):
                await api.ping("r1", f"http://127.0.0.1:{port}")


async def test_answers_have_a_size(replica: Replica, api: EngineApi) -> None:
    most = 8 << 20
    await api.ping("r1", await replica({"/health": (200, "a" * most)}))
    with pytest.raises(UpstreamBroken, match=f"more than {most} bytes"):
        await api.ping("r1", await replica({"/health": (200, "a" * (most + 1))}))


async def test_compressed_answers_are_refused(serve: Serve, api: EngineApi) -> None:
    async def handler(request: web.Request) -> web.Response:
        assert request.headers["Accept-Encoding"] == "identity"
        bomb = gzip.compress(bytes(10_000_000))
        return web.Response(body=bomb, headers={"Content-Encoding": "gzip"})

    with pytest.raises(UpstreamBroken, match="compressed"):
        await api.facts("r1", await serve(handler))


async def test_an_answer_that_drips_has_an_end(serve: Serve) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b"a")
            await asyncio.sleep(0.02)

    async with EngineApi(timeout_s=0.1) as api:
        with pytest.raises(UpstreamTimeout):
            await api.ping("r1", await serve(handler))


async def test_cookies_are_not_kept(serve: Serve, api: EngineApi) -> None:
    cookies: list[str | None] = []

    async def handler(request: web.Request) -> web.Response:
        cookies.append(request.headers.get("Cookie"))
        return web.Response(headers={"Set-Cookie": f"a{len(cookies)}=1; Path=/"})

    url = await serve(handler)
    for _ in range(3):
        await api.ping("r1", url)

    assert cookies == [None] * 3


@pytest.mark.parametrize(
    "line",
    [
        'vllm:cache_config_info{block_size="²",num_gpu_blocks="' + "9" * 5000 + '"} 1.0',
        'vllm:cache_config_info{block_size="-16",num_gpu_blocks="x"} 1.0',
        'vllm:cache_config_info{block_size="0",num_gpu_blocks="1e5"} 1.0',
        'vllm:cache_config_info{block_size="99999999"} 1.0',
    ],
)
async def test_senseless_figures_are_left_out(replica: Replica, api: EngineApi, line: str) -> None:
    url = await replica({"/v1/models": MODELS, "/metrics": (200, "# x\n" + line)})

    facts = await api.facts("r1", url)

    assert (facts.block_size, facts.num_gpu_blocks) == (None, None)


@pytest.mark.parametrize(
    ("figures", "state"),
    [
        ({"awake": "1.0", "weights_offloaded": "0.0", "discard_all": "0.0"}, "awake"),
        ({"awake": "0.0", "weights_offloaded": "1.0", "discard_all": "0.0"}, "emptied"),
        ({"awake": "0.0", "weights_offloaded": "0.0", "discard_all": "1.0"}, "emptied"),
        ({"awake": "0.0", "weights_offloaded": "0.0", "discard_all": "0.0"}, "asleep"),
        ({"awake": "x"}, "awake"),
        ({}, "awake"),
    ],
)
async def test_sleep_is_in_the_metrics(
    replica: Replica, api: EngineApi, figures: dict[str, str], state: str
) -> None:
    page = "\n".join(
        f'vllm:engine_sleep_state{{engine="0",model_name="m",sleep_state="{name}"}} {value}'
        for name, value in figures.items()
    )
    url = await replica({"/v1/models": MODELS, "/metrics": (200, page)})
    facts, load = await api.facts("r1", url), await api.load("r1", url)

    assert facts.sleep == state
    assert load is not None
    assert load.sleep == state


async def test_too_many_models_are_refused(replica: Replica, api: EngineApi) -> None:
    many = [{"id": f"m{number}"} for number in range(engine_pages.MAX_MODELS + 1)]

    with pytest.raises(UpstreamBroken, match="the limit is 1024"):
        await api.facts("r1", await replica({"/v1/models": {"data": many}}))


async def test_ranks_are_bounded(replica: Replica, api: EngineApi) -> None:
    lines = [f'vllm:num_requests_running{{engine="{rank}"}} 1e308' for rank in range(1_000)]
    sources = {str(rank): {"endpoint": "tcp://*:1"} for rank in (-1, 0, 255, 256, 10**9)}
    url = await replica(
        {
            "/v1/models": MODELS,
            "/metrics": (200, "\n".join(lines)),
            "/kv_event_sources": sources,
        }
    )

    facts = await api.facts("r1", url)
    load = await api.load("r1", url)

    assert facts.rank_numbers == (0, 255, 256)
    assert set(facts.event_sources) == {0, 1, 2}
    assert load is not None
    assert {each.num_running for each in load.ranks.values()} == {0}
    assert len(load.ranks) == engine_metrics.MAX_RANKS


async def test_a_host_that_does_not_resolve_is_not_one_that_refuses(api: EngineApi) -> None:
    with pytest.raises(
        HostUnknown, match=r"//engine.invalid:8000/v1/models: its host name does not resolve"
    ):
        await api.models("r1", "http://engine.invalid:8000")
    with pytest.raises(UpstreamUnreachable, match="refused the connection"):
        await api.models("r1", f"http://127.0.0.1:{free_port()}")


@pytest.mark.parametrize(
    ("page", "path", "said"),
    [
        ((404, "not found"), "", "not an OpenAI-compatible server"),
        ((404, "not found"), "/v1/chat/completions", "without '/v1/chat/completions'?"),
        ((400, "Client sent an HTTP request to an HTTPS server."), "", "Then write https://"),
    ],
)
async def test_a_wrong_base_url_gets_a_hint(
    replica: Replica, api: EngineApi, page: object, path: str, said: str
) -> None:
    url = await replica({f"{path}/v1/models": page})

    with pytest.raises(UpstreamBroken) as error:
        await api.models("r1", url + path)

    assert said in error.value.message


async def test_a_tls_port_that_is_asked_in_plain_http_has_a_hint(api: EngineApi) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(UpstreamBroken, match=r"does it speak TLS\? Then write https://"):
            await api.models("r1", url)
