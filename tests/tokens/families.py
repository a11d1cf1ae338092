"""Model families, and what vLLM makes of generated conversations for each of them.

`python -m tests.tokens.families NAME …`, where vLLM is installed, runs the engine's own request
models and renderers (the code behind its routes, no weights) and prints fingerprints of the ids,
null where the engine refuses a conversation. `prove_families` compares them with ours.

All families use the tiny model's tokenizer, gpt-oss its own: what differs is the rendering.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

from tests.conversations import conversations
from tests.tokens.record_golden import HERE, MODEL, fingerprint

SEED, COUNT = 7, 150
APIS = ("chat", "messages", "responses")
DATE = datetime.date(2025, 6, 28)


class Family(NamedTuple):
    """How the engine renders a family.

    mode: `--tokenizer-mode`.
    template: `--chat-template`; None: the model's, or none is used.
    """

    mode: str
    template: Path | None = None

    @property
    def is_harmony(self) -> bool:
        return self.mode == "harmony"


FAMILIES = {
    "gpt-oss": Family("harmony"),
    "deepseek-v3.2": Family("deepseek_v32"),
    "deepseek-v4": Family("deepseek_v4"),
    **{
        path.stem: Family("hf", path)
        for path in sorted((HERE / "templates/families").glob("*.jinja"))
    },
}


def family(name: str) -> Family:
    """Return a family by its name, or the one whose template is the file of this name."""
    return FAMILIES[name] if name in FAMILIES else Family("hf", Path(name))


def record(names: list[str], seed: int, count: int) -> dict[str, list[str | None]]:
    """Ask vLLM for the fingerprints by "family API"; only where it is installed.

    `count` chats, and half as many by each of the other APIs.
    """
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_SYSTEM_START_DATE"] = DATE.isoformat()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.renderers.chat_utils import load_chat_template
    from vllm.renderers.online_renderer import OnlineRenderer
    from vllm.renderers.registry import renderer_from_config

    def engine(shown: Family) -> OnlineRenderer:
        arguments = EngineArgs(
            model=str(MODEL),
            load_format="dummy",
            enforce_eager=True,
            block_size=32,
            tokenizer_mode="hf" if shown.is_harmony else shown.mode,
        )
        config = arguments.create_engine_config()
        made = OnlineRenderer(
            config.model_config,
            renderer_from_config(config),
            request_logger=None,
            chat_template=load_chat_template(shown.template),
            chat_template_content_format="auto",
            enable_auto_tools=True,
            tool_parser="hermes",
        )
        if shown.is_harmony:  # as for a model of the type gpt_oss
            made.use_harmony, made.parser = True, None
        return made

    def messages_api(renderer: OnlineRenderer) -> Any:
        """Make what serves /v1/messages, without an engine."""
        made: Any = object.__new__(AnthropicServingMessages)
        made.online_renderer = renderer
        made.model_config = renderer.model_config
        made._merge_inline_system = made._should_merge_inline_system(renderer)
        made._disabled_thinking_effort = None
        return made

    async def ids(serving: Any, api: str, body: dict[str, Any]) -> list[int]:
        renderer = serving.online_renderer
        if api == "responses":
            answer = await renderer.render_responses(ResponsesRequest.model_validate(body))
            return answer.engine_input["prompt_token_ids"]  # type: ignore[no-any-return]
        if api == "messages":
            chat = serving.to_chat_completion_request(
                AnthropicMessagesRequest.model_validate(body),
                merge_inline_system=serving._merge_inline_system,
                disabled_thinking_effort=await serving._get_disabled_thinking_effort(),
            )
        else:
            chat = ChatCompletionRequest.model_validate(body)
        answer = await renderer.render_chat(chat)
        return answer[1][0]["prompt_token_ids"]  # type: ignore[no-any-return]

    async def entry(serving: Any, api: str, body: dict[str, Any]) -> str | None:
        try:
            return fingerprint(await ids(serving, api, body))
        except Exception:
            return None

    async def everything() -> dict[str, list[str | None]]:
        found: dict[str, list[str | None]] = {}
        for name in names:
            serving = messages_api(engine(family(name)))
            for api in APIS:
                found[f"{name} {api}"] = [
                    await entry(serving, api, getattr(conversation, api)())
                    for conversation in conversations(seed, count // 2 if api != "chat" else count)
                ]
        return found

    return asyncio.run(everything())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("families", nargs="*", default=sorted(FAMILIES))
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=COUNT)
    given = parser.parse_intermixed_args()
    print(json.dumps(record(given.families, given.seed, given.count)), flush=True)
    os._exit(0)  # vLLM's threads would linger


if __name__ == "__main__":
    main()
