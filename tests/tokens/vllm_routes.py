"""What vLLM's own routes make of a body: its request models and renderers, without weights.

Only where vLLM is installed: it is imported when `Rendering` is made, not before.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).parent
MODEL: Final = HERE.parents[1] / "loadtest" / "tiny_model"


def fingerprint(ids: list[int]) -> str:
    """Name a list of token ids."""
    return f"{len(ids)}:{blake2b(array('I', ids).tobytes(), digest_size=8).hexdigest()}"


class Rendering:
    """A model as an engine renders it; `mode`: its `--tokenizer-mode`."""

    def __init__(self, model: Path = MODEL, mode: str = "hf") -> None:
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
        from vllm.engine.arg_utils import EngineArgs
        from vllm.renderers.registry import renderer_from_config

        arguments = EngineArgs(
            model=str(model),
            load_format="dummy",
            enforce_eager=True,
            block_size=32,
            tokenizer_mode=mode,
            trust_remote_code=True,
        )
        self._config = arguments.create_engine_config()
        self._renderer = renderer_from_config(self._config)

    def routes(
        self,
        template: Path | None,
        *,
        is_harmony: bool = False,
        efforts: Mapping[str, str] | None = None,
        defaults: Mapping[str, Any] | None = None,
        content_format: str = "auto",
    ) -> Routes:
        """Make the routes of an engine with this `--chat-template`; None: the model's own.

        Args:
            efforts: Its `--reasoning-effort-map`, which releases before 0.33 do not have.
            defaults: Its `--default-chat-template-kwargs`.
            content_format: Its `--chat-template-content-format`.
        """
        from vllm.renderers.chat_utils import load_chat_template
        from vllm.renderers.online_renderer import OnlineRenderer

        made = OnlineRenderer(
            self._config.model_config,
            self._renderer,
            request_logger=None,
            chat_template=load_chat_template(template),
            chat_template_content_format=content_format,  # type: ignore[arg-type]
            enable_auto_tools=True,
            tool_parser="hermes",
            default_chat_template_kwargs=dict(defaults or {}),
        )
        if efforts and hasattr(made, "reasoning_effort_map"):
            made.reasoning_effort_map = dict(efforts)
        if is_harmony:  # as for a model of the type gpt_oss
            made.use_harmony, made.parser = True, None
        return Routes(made)


class Routes:
    """The routes by name: chat, completion, messages, responses."""

    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer

    async def entry(self, api: str, body: dict[str, Any]) -> str | None:
        """Return the fingerprint of a body's ids; None: the engine refuses it."""
        if api == "messages":
            _ = self._messages  # with some templates no engine starts: not the body's fault
        try:
            return fingerprint(await self._ids(api, body))
        except Exception:
            return None

    async def _ids(self, api: str, body: dict[str, Any]) -> list[int]:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

        answer: Any
        if api == "responses":
            answer = await self._renderer.render_responses(ResponsesRequest.model_validate(body))
            return answer.engine_input["prompt_token_ids"]  # type: ignore[no-any-return]
        if api == "completion":
            answer = await self._renderer.render_completion(CompletionRequest.model_validate(body))
            return answer[0]["prompt_token_ids"]  # type: ignore[no-any-return]
        is_messages = api == "messages"
        chat = await self._chat(body) if is_messages else ChatCompletionRequest.model_validate(body)
        answer = await self._renderer.render_chat(chat)
        return answer[1][0]["prompt_token_ids"]  # type: ignore[no-any-return]

    async def _chat(self, body: dict[str, Any]) -> Any:
        """Convert a body of `/v1/messages` as its route does."""
        from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest

        serving, request = self._messages, AnthropicMessagesRequest.model_validate(body)
        if hasattr(serving, "disabled_thinking_effort_resolver"):  # 0.33
            effort = await serving.disabled_thinking_effort_resolver.resolve_for(request)
        else:
            effort = await serving._get_disabled_thinking_effort()
        return serving.to_chat_completion_request(
            request,
            merge_inline_system=serving._merge_inline_system,
            disabled_thinking_effort=effort,
        )

    @cached_property
    def _messages(self) -> Any:
        """What serves `/v1/messages`, without an engine, with what it tries out on the template."""
        from vllm.entrypoints.anthropic import serving

        made: Any = object.__new__(serving.AnthropicServingMessages)
        made.online_renderer = self._renderer
        made.model_config = self._renderer.model_config
        made._merge_inline_system = made._should_merge_inline_system(self._renderer)
        made._disabled_thinking_effort = None
        if hasattr(serving, "DisabledThinkingEffortResolver"):
            resolver = serving.DisabledThinkingEffortResolver(self._renderer)
            made.disabled_thinking_effort_resolver = resolver
        return made
