"""router.assembly.read_files: what is read from a file is read again, by one rule for all keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from router.assembly import read_files
from router.config import options
from tests.faults.stage import SECRET, Engines, Stage, chat, on_stage
from tests.redis_servers import Start


def test_every_key_that_names_a_file_has_a_rule() -> None:
    """A new key is put into the table at the head of the module."""
    rules = read_files.__doc__ or ""
    for option in options():
        if option.is_file:
            section, name = option.path[0], option.path[-1]
            prefix = f"{section}.tls_…" if name.startswith("tls_") else f"{section}."
            assert prefix in rules, option.path
            assert name in rules or "tls_" in name or name == "client_key", option.path


async def test_an_engines_new_key_is_sent_with_the_next_probe(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(SECRET)
    async with Engines(1) as engines:
        async with on_stage(*engines, engine__api_key_file=file) as stage:
            file.write_text("n3w")
            await read_again(stage, "engine.api_key_file")
            [replica] = stage.router.fleet.members.replicas

            sent = stage.router.engine_key.headers(replica.url)
            assert sent == {"Authorization": "Bearer n3w"}


async def test_a_new_admin_token_is_asked_for(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("old")
    async with Engines(1) as engines, on_stage(*engines, admin__token_file=file) as stage:

        async def status(token: str) -> int:
            headers = {"Authorization": f"Bearer {token}"}
            url = stage.admin_url
            async with ClientSession() as client:
                async with client.get(f"{url}/admin/replicas", headers=headers) as answer:
                    return answer.status

        assert (await status("old"), await status("new")) == (200, 401)
        file.write_text("new")
        await read_again(stage, "admin.token_file")
        assert (await status("old"), await status("new")) == (401, 200)

        file.write_text("")
        await read_again(stage, "token is empty")
        assert await status("new") == 200


async def test_a_new_password_of_redis_is_used(
    start_redis: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "password"
    file.write_text("old\n")
    server = start_redis("7", requirepass="old")
    settings: dict[str, Any] = {"redis__password_file": file}
    async with Engines(1) as engines:
        async with on_stage(*engines, redis=server, redis_password="old", **settings) as stage:
            file.write_text("new\n")
            await read_again(stage, "redis.password_file")
            server.client.config_set("requirepass", "new")
            server.cut_connections()
            await stage.until(lambda: stage.log.count("redis is connected") == 2)


async def test_a_changed_chat_template_is_compiled_again(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    )
    file.write_text(text)
    async with Engines(1) as engines:
        async with on_stage(*engines, tokens__chat_templates={"tiny": file}) as stage:
            before = stage.router.prompters.get("tiny")
            file.write_text(text + "<|im_start|>assistant\n")
            await read_again(stage, "tokens.chat_templates.tiny")
            await stage.until(lambda: stage.router.prompters.get("tiny") is not before)
            assert (await stage.ask(chat("a"))).status == 200


async def read_again(stage: Stage, said: str) -> None:
    stage.router.read_files.want()
    await stage.until(
        lambda: "file" in stage.log and "read again" in stage.log and said in stage.log
    )
