"""`models.aliases` in a whole router: a client's own names of models, and what engines get."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from router import config
from router.base.errors import ConfigError
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import SECRET, Engines, arm, chat, on_stage, words
from tests.faults.tenants import A, B, tenants_file

ALIASES = {"models__aliases": {"claude-*": "tiny"}}
CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/messages/count_tokens"])
async def test_a_client_may_use_names_of_its_own(path: str) -> None:
    """Its next turn is predicted; a name that is no alias is refused as before."""
    body = chat(words(1)) | {"model": "claude-opus-9"}
    async with Engines(2) as engines, on_stage(*engines, **ALIASES) as stage:
        first = await stage.ask(body, path)
        await stage.settled(*engines)
        again = await stage.ask(body, path)
        other = await stage.ask(body | {"model": "gpt-9"}, path)

        assert (first.status, again.status, other.status) == (200, 200, 404)
        if not path.endswith("count_tokens"):
            assert again.replica == first.replica
            assert again.predicted > 0


async def test_the_engine_gets_its_own_name_and_the_rest_as_it_was() -> None:
    body = b'{"messages": [{"role":"user","content":"hi"}], "model":"claude-x", "max_tokens": 4}'
    headers = {"Content-Type": "application/json"}
    async with FakeEngine() as engine, on_stage(engine, **ALIASES) as stage:
        reply = await stage.ask(body, CHAT, headers=headers)

        assert reply.status == 200
        (received,) = engine.received
        assert orjson.loads(received.body) == orjson.loads(body) | {"model": "tiny"}


async def test_a_tenants_models_are_those_that_are_served(tmp_path: Path) -> None:
    """An alias opens no model that a tenant may not use."""
    file = tenants_file(tmp_path, b="models: [other]")
    body = chat("a") | {"model": "claude-x"}
    async with FakeEngine() as engine, on_stage(engine, tenants__file=file, **ALIASES) as stage:
        allowed = await stage.ask(body, CHAT, headers=A)
        refused = await stage.ask(body, CHAT, headers=B)

        assert (allowed.status, refused.status) == (200, 404)


async def test_a_request_that_ends_replicas_is_known_by_what_its_client_sent() -> None:
    """So it is refused when it comes again under its alias."""
    body = chat(f"{SECRET} kills") | {"model": "claude-x"}
    async with Engines(3) as engines, on_stage(*engines, **ALIASES) as stage:
        for engine in engines:
            arm(engine, "kill_before", text="kills")
        await stage.ask(body)
        await stage.until(lambda: stage.router.deaths.num_suspects == 2)
        refused = await stage.ask(body)

        assert (refused.status, refused.error["type"]) == (422, "request_kills_replicas")


@pytest.mark.parametrize("model", ["", "tiny-*"])
def test_an_alias_leads_to_one_model(tmp_path: Path, model: str) -> None:
    file = tmp_path / "warmroute.yaml"
    file.write_text(f'models: {{aliases: {{"claude-*": "{model}"}}}}')

    with pytest.raises(ConfigError, match=r"models\.aliases"):
        config.load(file)
