"""Record what vLLM makes of `messages_corpus`: `python -m tests.tokens.record_messages`.

As record_golden, with the engine's own conversion of `/v1/messages` in front of its renderer, and
what it tries out on each template. Writes golden/messages/*.json.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.tokens.messages_corpus import messages_bodies
from tests.tokens.record_golden import GOLDEN, HERE, MODEL, fingerprint
from tests.tokens.record_golden import TEMPLATES as CHAT_TEMPLATES

SEED, COUNT = 1, 600
TEMPLATES: dict[str, Path | None] = {
    **{name: CHAT_TEMPLATES[name] for name in ("model", "agent", "parts")},
    **{path.stem: path for path in sorted((HERE / "templates" / "messages").glob("*.jinja"))},
}
"""The chats' own `dump` is one with which an engine with this API does not start."""


def record(seed: int = SEED, count: int = COUNT) -> dict[str, list[str | None]]:
    """Ask vLLM, template by template."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.renderers.chat_utils import load_chat_template
    from vllm.renderers.online_renderer import OnlineRenderer
    from vllm.renderers.registry import renderer_from_config

    arguments = EngineArgs(model=str(MODEL), load_format="dummy", enforce_eager=True, block_size=32)
    config = arguments.create_engine_config()
    renderer = renderer_from_config(config)

    def serving(template: Path | None) -> Any:
        """Make what serves the route, without an engine."""
        made: Any = object.__new__(AnthropicServingMessages)
        made.online_renderer = OnlineRenderer(
            config.model_config,
            renderer,
            request_logger=None,
            chat_template=load_chat_template(template),
            chat_template_content_format="auto",
            enable_auto_tools=True,
            tool_parser="hermes",
        )
        made.model_config = config.model_config
        made._merge_inline_system = made._should_merge_inline_system(made.online_renderer)
        made._disabled_thinking_effort = None
        return made

    async def messages(made: Any, body: dict[str, Any]) -> str | None:
        try:
            request = AnthropicMessagesRequest.model_validate(body)
            chat = made.to_chat_completion_request(
                request,
                merge_inline_system=made._merge_inline_system,
                disabled_thinking_effort=await made._get_disabled_thinking_effort(),
            )
            answer = await made.online_renderer.render_chat(chat)
            return fingerprint(answer[1][0]["prompt_token_ids"])
        except Exception:
            return None

    async def everything() -> dict[str, list[str | None]]:
        found = {}
        for name, path in TEMPLATES.items():
            made = serving(path)
            found[name] = [await messages(made, body) for body in messages_bodies(seed, count)]
            print(name, made._merge_inline_system, made._disabled_thinking_effort)
        return found

    return asyncio.run(everything())


if __name__ == "__main__":
    seed, count, directory = SEED, COUNT, GOLDEN / "messages"
    if len(sys.argv) == 4:
        seed, count, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    directory.mkdir(parents=True, exist_ok=True)
    for name, entries in record(seed, count).items():
        text = json.dumps({"seed": seed, "entries": entries}, indent=0)
        (directory / f"{name}.json").write_text(text + "\n")
        print(name, sum(entry is not None for entry in entries), "of", len(entries))
    os._exit(0)  # vLLM's threads would linger
