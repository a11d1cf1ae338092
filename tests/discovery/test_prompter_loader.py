"""router.discovery.prompter_loader at a router's end."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, tzinfo
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from router.api.openai import parse_chat
from router.base.engines import V0_32
from router.config import TokensConfig
from router.discovery import prompter_loader
from router.discovery.prompter_loader import PrompterLoader, configured_prompter
from router.tokens import Prompters
from router.tokens.encoder import text_of
from tests.tokens.vllm_routes import MODEL
from tests.waiting import until


async def test_a_tokenizer_that_loads_during_shutdown_is_dropped() -> None:
    raised = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context))
    threads = ThreadPoolExecutor(1)
    prompters = Prompters()
    model = SimpleNamespace(id="m", root=str(MODEL), parent=None)
    loader = PrompterLoader(prompters, TokensConfig(), threads)
    loader.load(SimpleNamespace(version=None, models=(model,)))  # type: ignore[arg-type]
    threads.shutdown(wait=False)
    await until(lambda: prompters.get("m"))
    await asyncio.sleep(0)

    assert raised == []


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        ({"time_zone": "UTC"}, "31 Dec 2026"),
        ({"time_zone": "Pacific/Kiritimati"}, "01 Jan 2027"),
        ({"time_zone": "UTC", "start_dates": {"m": "2026-01-05"}}, "05 Jan 2026"),
    ],
)
def test_prompts_contain_the_engines_date(
    keys: dict[str, Any], shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is today's date in the engines' time zone, or the date that they were started with."""
    template = tmp_path / "dated.jinja"
    template.write_text("{{ strftime_now('%d %b %Y') }}")
    config = TokensConfig(chat_templates={"m": template}, **keys)
    monkeypatch.setattr(prompter_loader, "datetime", NewYearsEve)

    prompter = configured_prompter("m", str(MODEL), str(MODEL), config, V0_32)

    request = parse_chat({"messages": [{"role": "user", "content": "hi"}]})
    assert text_of(prompter.render(request)) == shown


class NewYearsEve(datetime):
    """A clock at noon, UTC, on the last day of 2026."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:
        return datetime(2026, 12, 31, 12, tzinfo=UTC).astimezone(tz)
