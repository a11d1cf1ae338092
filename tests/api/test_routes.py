"""router.api.routes: what the public port serves, and in which spelling."""

from __future__ import annotations

import pytest

from router.api.routes import Route, Routes, check_pattern, loggable
from router.base.errors import MethodNotAllowed, UnknownRoute

SERVED = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("GET", "/v1/responses/resp_1-x"),
    ("DELETE", "/v1/responses/resp_1"),
    ("POST", "/v1/responses/resp_1/cancel"),
    ("GET", "/v1/responses/resp_1/input_items"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/embeddings"),
    ("POST", "/rerank"),
    ("POST", "/v1/rerank"),
    ("POST", "/v2/rerank"),
    ("POST", "/v1/audio/transcriptions"),
    ("POST", "/inference/v1/generate"),
    ("POST", "/v1/chat/completions/render"),
    ("POST", "/invocations"),
    ("POST", "/tokenize"),
    ("OPTIONS", "/v1/embeddings"),
    ("HEAD", "/v1/models"),
]

WITHHELD = [
    # FLEETS.md section 4, and vLLM 0.32's openapi.json with everything switched on.
    "/", "/metrics", "/load", "/version", "/health", "/ping", "/kv_event_sources", "/docs",
    "/openapi.json", "/scale_elastic_ep", "/is_scaling_elastic_ep", "/start_profile",
    "/stop_profile", "/fault_tolerance/apply", "/fault_tolerance/status", "/tokenizer_info",
    "/abort_requests", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/adapters",
    "/adapters/x", "/sleep", "/wake_up", "/is_sleeping", "/release_kv_cache_memory",
    "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/collective_rpc",
    "/server_info", "/pause", "/resume", "/is_paused", "/update_weights", "/weight_info",
    "/init_weight_transfer_engine", "/get_world_size", "/v1/chat/completions/derender",
]  # fmt: skip


@pytest.mark.parametrize(("method", "path"), SERVED)
def test_inference_models_and_tokens_are_served(method: str, path: str) -> None:
    """They are served as they are, and with a slash at the end, which is removed."""
    assert Routes().find(method, path).path == path
    assert Routes().find(method, path + "/").path == path


@pytest.mark.parametrize("path", WITHHELD)
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE"])
def test_control_and_insight_are_not(method: str, path: str) -> None:
    """These routes of an engine are refused with any method."""
    with pytest.raises(UnknownRoute, match=r"forward\.routes"):
        Routes().find(method, path)


def test_a_message_has_no_raw_bytes_in_it() -> None:
    """The error message can be written as JSON, whatever path was sent."""
    with pytest.raises(UnknownRoute) as caught:
        Routes().find("GET", "/\udcff\r\n\x00" + "é" * 9999)

    assert caught.value.message.isascii()
    assert len(caught.value.message) < 1500


def test_an_operator_adds_routes() -> None:
    """The configuration may add a route, a route with its method, or all below a prefix."""
    routes = Routes(["/version", "GET /v1/files", "/x/*", "GET /y/*", "PATCH /tokenize"])

    assert routes.find("GET", "/version") == Route("/version", takes="any")
    assert routes.find("POST", "/version/").path == "/version"
    assert routes.find("GET", "/v1/files").path == "/v1/files"
    assert routes.find("PUT", "/x/a/b%20c").path == "/x/a/b%20c"
    assert routes.find("GET", "/y/a").path == "/y/a"
    assert routes.find("PATCH", "/tokenize").path == routes.find("POST", "/tokenize").path
    for method, path in (("POST", "/v1/files"), ("GET", "/x"), ("POST", "/y/a"), ("GET", "/z")):
        with pytest.raises((UnknownRoute, MethodNotAllowed)):
            routes.find(method, path)


@pytest.mark.parametrize(
    "path",
    ["/x//a", "/x/../a", "/x/./a", "/x/..", "/x/%2e%2e/a", "/x/a%2fb", "/x/a%5Cb", "/x/a\\b",
     "/x/a;b", "/x/a%3bb", "/x/%61", "/x/%00", "/x/%252e", "/x/a%", "/x/a%zz", "/x/é", "/x/a b",
     "/x/a#b", "/x/%3f", "/x/%0a", "/x/%7f", "/x/%20", "/x/a%20"],
)  # fmt: skip
def test_below_a_prefix_a_path_has_one_meaning(path: str) -> None:
    """Paths that two servers might read differently are refused."""
    with pytest.raises(UnknownRoute):
        Routes(["/x/*", "/*"]).find("GET", path)


@pytest.mark.parametrize(
    "pattern", ["x", "", "/x y", "get /x", "/a//b", "/%61", "/*/x", "/x*/../y"]
)
def test_a_pattern_that_is_none_is_refused(pattern: str) -> None:
    """The error shows what a valid pattern looks like."""
    assert "write /path" in (check_pattern(pattern) or "")


@pytest.mark.parametrize("pattern", ["/x", "/x/y.z", "/x/*", "/*", "GET /x", "POST /x/*"])
def test_patterns(pattern: str) -> None:
    """Exact, below a prefix, everything."""
    assert check_pattern(pattern) is None


@pytest.mark.parametrize(
    ("path", "logged"),
    [
        ("/v1/embedings", "/v1/embedings"),
        ("/api/tags", "/api/tags"),
        ("/favicon.ico", "/favicon.ico"),
        ("/v1/", "/v1/"),
        ("//v1/chat", "//v1/chat"),
        ("/v1/files/file-3fa9", "/v1/files/*"),
        ("/sk-Abc/v1/models", "/*/v1/models"),
        ("/a%0ab/c", "/*/c"),
        ("/\x1b[2J\n", "/*"),
        ("/" + "a" * 300, "/*"),
        ("/tell me a secret", "/*"),
        ("*", "*"),
    ],
)
def test_a_path_in_the_log_has_no_word_of_a_client_but_plain_ones(path: str, logged: str) -> None:
    assert loggable(path) == logged
