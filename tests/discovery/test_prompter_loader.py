"""router.discovery.prompter_loader at a router's end."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

from router.config import TokensConfig
from router.discovery.prompter_loader import PrompterLoader
from router.tokens import Prompters
from tests.tokens.vllm_routes import MODEL


async def test_a_tokenizer_that_loads_during_shutdown_is_dropped() -> None:
    raised = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context))
    threads = ThreadPoolExecutor(1)
    prompters = Prompters()
    model = SimpleNamespace(id="m", root=str(MODEL), parent=None)
    loader = PrompterLoader(prompters, TokensConfig(), threads)
    loader.load(SimpleNamespace(version=None, models=(model,)))  # type: ignore[arg-type]
    threads.shutdown(wait=False)
    while prompters.get("m") is None:  # noqa: ASYNC110 (it has no event)
        await asyncio.sleep(0.01)
    await asyncio.sleep(0)

    assert raised == []
