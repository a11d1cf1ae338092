"""Tenants on real engines: each finds its own cache, and nothing of another's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from router.tenants.tenants import add
from tests.engines.harness import Engine, Router

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"]


def _body(path: str) -> dict[str, Any]:
    text = f"What {path} is asked. " + " ".join(f"word{i}" for i in range(120))
    messages = [{"role": "user", "content": text}]
    match path:
        case "/v1/completions":
            return {"model": "tiny", "prompt": text, "max_tokens": 1}
        case "/v1/responses":
            return {"model": "tiny", "input": text, "max_output_tokens": 16}
        case _:
            return {"model": "tiny", "messages": messages, "max_tokens": 1}


def _num_cached(answer: dict[str, Any]) -> int:
    """Read what the engine took from its cache, in each API's own usage."""
    usage = answer["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    return int(details["cached_tokens"] if details else usage.get("cache_read_input_tokens") or 0)


@pytest.mark.parametrize("path", PATHS)
def test_no_tenant_finds_anothers_cache(
    replicas: tuple[Engine, Engine], log_dir: Path, path: str
) -> None:
    """On one replica cached_tokens is 0 across tenants and users, and most of the prompt within."""
    file = log_dir / f"tenants{path.replace('/', '-')}.yaml"
    keys = {name: add(file, name) for name in ("a", "b")}
    config = {"replicas": [replicas[0].url], "tenants": {"file": str(file)}}
    with Router(replicas, log_dir, config=config) as router:

        def ask(tenant: str, **fields: Any) -> httpx.Response:
            response = httpx.post(
                router.url + path,
                json=_body(path) | fields,
                headers={"Authorization": f"Bearer {keys[tenant]}"},
                timeout=60,
            )
            response.raise_for_status()
            return response

        first, other, user = ask("a"), ask("b"), ask("a", cache_salt="user")
        again = [ask("a"), ask("b"), ask("a", cache_salt="user")]

    assert [_num_cached(reply.json()) for reply in (first, other, user)] == [0, 0, 0]
    assert all(_num_cached(reply.json()) >= 128 for reply in again)
    if path in PATHS[:2]:  # predicted to the block, where prompts are tokenized here
        for reply in (first, other, user, *again):
            gpu = reply.headers["x-warmroute-cached"].partition(";")[0]
            assert gpu == f"gpu={_num_cached(reply.json())}"
