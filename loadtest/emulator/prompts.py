"""Read the model and the prompts of a body, or refuse them as the engine does.

What must not live here: the fields of generation (wire), the answer (answers).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from loadtest.emulator.replica import Replica
from loadtest.emulator.tokens import Prompt
from loadtest.emulator.wire import (
    Api,
    ApiError,
    GenerationParams,
    invalid_field,
    invalid_value,
    unknown_model,
)

_EMPTY_PROMPT = "Either prompt or prompt_embeds must be provided and non-empty."


class PromptReader:
    """Reads bodies for one replica."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._prefix = replica.tokenizer.special_prefix()

    def model(self, body: Mapping[str, Any]) -> tuple[str, str | None]:
        """Return the model a body names, and the adapter's name if it is one.

        Raises:
            ApiError: The model is not served.
        """
        replica = self._replica
        name = body.get("model")
        if name is None:
            return replica.options.served_model_names[0], None
        if name not in replica.models:
            raise unknown_model(str(name), list(replica.options.served_model_names))
        return str(name), str(name) if name in replica.loras else None

    async def prompts(self, body: Mapping[str, Any], api: Api) -> list[Prompt]:
        """Read the prompts of a body; only completions may have several.

        Raises:
            ApiError: There is none.
        """
        return await self._completion(body) if api == "completion" else [await self.chat(body)]

    async def chat(self, body: Mapping[str, Any]) -> Prompt:
        """Read a chat's prompt.

        Raises:
            ApiError: There are no messages.
        """
        messages = body.get("messages")
        if messages is None:
            raise invalid_field("messages", "Field required")
        if not isinstance(messages, list):
            raise invalid_field("messages", "Input should be a valid list")
        reused = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        if reused is not None:
            return self._ids(reused)
        continues = body.get("continue_final_message") is True
        given = body.get("chat_template_kwargs")
        own = given if isinstance(given, dict) else {}
        own = {key: value for key, value in own.items() if value not in (None, "auto")}
        text = self._replica.tokenizer.render(
            messages,
            tools=body.get("tools"),
            add_generation_prompt=body.get("add_generation_prompt", not continues) is True,
            continue_final_message=continues,
            template=body.get("chat_template"),
            kwargs=self._replica.options.chat_template_kwargs | own,
        )
        prompt = await self._replica.encode(text)
        if self._prefix and body.get("add_special_tokens") is True:
            prompt = Prompt([*self._prefix, *prompt.ids])
        return prompt

    async def text(self, body: Mapping[str, Any], text: str) -> Prompt:
        """Tokenize a completion's text."""
        prompt = await self._replica.encode(text)
        if self._prefix and body.get("add_special_tokens", True) is True:
            return Prompt([*self._prefix, *prompt.ids])
        return prompt

    def check_length(self, prompt: Prompt, params: GenerationParams) -> None:
        """Refuse a prompt that exceeds the model's length.

        Raises:
            ApiError: It does.
        """
        longest, count = self._replica.max_model_len, len(prompt.ids)
        if params.max_tokens is not None and params.max_tokens > longest:
            raise invalid_value(
                f"max_tokens={params.max_tokens} cannot be greater than max_model_len={longest}.",
                "max_tokens",
                params.max_tokens,
            )
        if count > longest:
            raise invalid_value(
                f"This model's maximum context length is {longest} tokens. However, your prompt "
                f"contains {count} input tokens. Please reduce the length of the input prompt.",
                "input_tokens",
                count,
            )
        if count == longest:
            raise invalid_value("max_tokens must be at least 1, got 0.", "max_tokens", 0)

    async def _completion(self, body: Mapping[str, Any]) -> list[Prompt]:
        """Read a completion's prompts: a text, token ids, or a list of either."""
        prompt = body.get("prompt")
        match prompt:
            case str() if prompt:
                return [await self.text(body, prompt)]
            case [int(), *_]:
                return [self._ids(prompt)]
            case [str(), *_]:
                return [await self.text(body, text) for text in prompt]
            case [list(), *_]:
                return [self._ids(ids) for ids in prompt]
        raise invalid_value(_EMPTY_PROMPT, "prompt")

    def _ids(self, ids: Any) -> Prompt:
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise invalid_value(_EMPTY_PROMPT, "prompt")
        largest = max(ids)
        if (
            len(ids) <= self._replica.max_model_len
            and largest >= self._replica.tokenizer.vocab_size
        ):
            raise ApiError(400, f"Token id {largest} is out of vocabulary")
        return Prompt(ids)
