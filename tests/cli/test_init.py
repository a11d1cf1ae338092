"""`warmroute init`: the file it writes is valid, and says what engines lack."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from click.testing import CliRunner, Result
from jsonschema import Draft202012Validator

from router import config
from router.cli import main
from router.cli.init import SCHEMA, sections_text
from router.config.schema import json_schema
from tests.cli.running import said_at_start, serving
from tests.faults.fake_engine import FakeEngine
from tests.faults.stage import Engines, chat, words
from tests.ports import free_port
from tests.waiting import until_ready


async def init(*args: str) -> Result:
    """Run `init` beside the loop that serves what it asks."""
    wait = ("--wait", "60")
    return await asyncio.to_thread(lambda: CliRunner().invoke(main, ["init", *wait, *args]))


def text_of(file: Path) -> str:
    return file.read_text()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "warmroute.yaml"


async def test_the_file_is_valid_and_serves_requests(file: Path) -> None:
    """Strictly read; `serve --config` starts with it, and a request is answered."""
    async with Engines(2) as (first, second):
        result = await init("-o", str(file), first.url, second.url)
        loaded = config.load(file)
        ports = ("--port", "0", "--admin-port", "0")
        async with serving("--config", str(file), *ports) as process:
            found = re.search(r"listens on (\S+)", await said_at_start(process))
            assert found is not None
            async with aiohttp.ClientSession(found[1]) as client:
                await until_ready(client)
                body = chat(words(1))
                answer = await client.post("/v1/chat/completions", json=body)
                status, replica = answer.status, answer.headers["x-warmroute-replica"]

    assert result.exit_code == 0, result.output
    assert result.stderr.startswith(f"wrote {file}: 2 replicas\n")
    assert [replica.url for replica in loaded.replicas] == [first.url, second.url]
    assert loaded.listen.host == "127.0.0.1"
    assert "0.0.0.0: for other hosts" in " ".join(re.sub(r"\n +#", "", text_of(file)).split())
    assert (
        list(Draft202012Validator(json_schema()).iter_errors(yaml.safe_load(text_of(file)))) == []
    )
    assert (status, replica in ("r1", "r2")) == (200, True)


def test_every_example_is_a_valid_key(file: Path) -> None:
    """What is a comment loads, too, when the comment signs are taken away."""
    text = "\n".join(sections_text())
    uncommented = re.sub(r"^(\s*)# (?=\s*[a-z_]+:)", r"\1", text, flags=re.MULTILINE)
    file.write_text(uncommented.replace("HOST", "h"))

    loaded = config.load(file)

    assert loaded.redis.url == "redis://h:6379/0"
    assert loaded.log.decisions == Path("decisions.jsonl")


async def test_what_engines_lack_is_said_with_the_flag_to_add(file: Path) -> None:
    """At each replica, with event ports that no other replica of the file has."""
    async with (
        Engines(1) as (good,),
        Engines(2, events=False, enable_prefix_caching=False) as (bad, worse),
    ):
        result = await init("-o", str(file), good.url, bad.url, worse.url)
    _, *replicas = text_of(file).partition("\nlisten:")[0].split("  - url: ")
    good_text, bad_text, worse_text = replicas

    assert "-> " not in good_text.partition("only a request")[0]
    for text, port in ((bad_text, 5559), (worse_text, 5561)):
        assert "# prefix caching: off" in text
        assert "-> start the engine without --no-enable-prefix-caching" in text
        assert f'"endpoint": "tcp://*:{port}", "replay_endpoint": "tcp://*:{port + 1}"' in text
    assert "--enable-prompt-tokens-details" in worse_text
    assert "! replica r2: events: BLIND: started without KV events" in result.stderr
    assert len(config.load(file).replicas) == 3


async def test_an_engine_without_tools_or_tokenizer_is_said(file: Path) -> None:
    """With the parser to set, and the key for the tokenizer's directory."""
    models = {"data": [{"id": "no/such: model", "root": "/nowhere"}]}
    refusal = {"error": {"message": "needs --enable-auto-tool-choice"}}
    async with FakeEngine() as engine:
        engine.pages["/v1/models"] = models
        engine.pages["/v1/chat/completions"] = (400, json.dumps(refusal))
        await init("-o", str(file), engine.url)
    text = text_of(file)

    assert "# tools: agents get 400" in text
    assert "--tool-call-parser PARSER" in text
    assert '# tokens: {models: {"no/such: model": DIRECTORY}}' in text


@pytest.mark.parametrize("name", ["x\nreplicas: []\n#", "x\u2028y: 1", "x\x00y", "x" * 400])
async def test_no_word_of_an_engine_gets_out_of_its_comment(file: Path, name: str) -> None:
    """The names of models are an engine's own."""
    models: Any = {"data": [{"id": name, "root": "/nowhere"}]}
    async with FakeEngine() as engine:
        engine.pages["/v1/models"] = models
        await init("-o", str(file), engine.url)

    assert [replica.url for replica in config.load(file).replicas] == [engine.url]


async def test_an_engine_with_a_key_is_asked_with_the_key(file: Path, tmp_path: Path) -> None:
    """Without it the file says where to put it."""
    key = tmp_path / "key"
    key.write_text("k3y")
    async with FakeEngine() as engine:
        engine.pages["/v1/models"] = (401, "no key")
        await init("-o", str(file), engine.url)
        locked = text_of(file)
    async with Engines(1) as (opened,):
        await init("-o", str(file), "--force", "--engine-api-key-file", str(key), opened.url)

    assert "# engine: {api_key_file: FILE}" in locked
    assert config.load(file).engine.api_key_file == key
    assert "k3y" not in text_of(file)


async def test_a_file_is_overwritten_only_if_forced(file: Path) -> None:
    """What is there stays, and nothing is asked."""
    await asyncio.to_thread(file.write_text, "log: {}\n")
    async with Engines(1) as (engine,):
        refused = await init("-o", str(file), engine.url)
        before = text_of(file)
        forced = await init("-o", str(file), "--force", engine.url)
        printed = await init("-o", "-", engine.url)

    assert refused.exit_code == 2
    assert refused.stderr.startswith(f"warmroute: {file} exists; overwrite it with --force")
    assert before == "log: {}\n"
    assert forced.exit_code == 0
    assert yaml.safe_load(printed.stdout)["replicas"] == [{"url": engine.url}]


async def test_the_schema_is_named_where_it_is_beside_the_file(file: Path) -> None:
    """Editors find it by the first line."""
    async with Engines(1) as (engine,):
        await init("-o", str(file), engine.url)
        without = text_of(file)
        (file.parent / SCHEMA).write_text("{}")
        await init("-o", str(file), "--force", engine.url)

    assert "yaml-language-server" not in without
    assert text_of(file).startswith("# yaml-language-server: $schema=warmroute.schema.json\n")


async def test_without_a_url_ports_of_this_machine_are_tried(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What answers as an engine is written, what does not is not; it is said which were tried."""
    async with Engines(1) as (engine,), FakeEngine() as other:
        other.pages["/v1/models"] = (404, "")
        ports = [int(url.rpartition(":")[2]) for url in (engine.url, other.url)]
        monkeypatch.setattr(sys.modules["router.cli.init"], "PORTS", [*ports, free_port()])
        found = await init("-o", str(file))
    nothing = await init("-o", "-")

    assert found.exit_code == 0
    assert found.stderr.startswith("no URL given: trying 127.0.0.1, ports ")
    assert [replica.url for replica in config.load(file).replicas] == [engine.url]
    assert nothing.exit_code == 1
    assert "name yours: warmroute init http://HOST:PORT" in nothing.stderr


@pytest.mark.parametrize("url", ["foo", "http://me:pw@h"])
async def test_a_wrong_url_is_one_line_and_exit_2(file: Path, url: str) -> None:
    """As `serve` says it."""
    result = await init("-o", str(file), url)

    assert result.exit_code == 2
    assert result.stderr.startswith("warmroute: replicas[0].url: ")
    assert not list(file.parent.iterdir())
