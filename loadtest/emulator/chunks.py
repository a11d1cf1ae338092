"""The answers of the chat and the completion route, whole and as the chunks of a stream.

Source: answers of vLLM 0.32.0 to the same requests (field by field), vllm/entrypoints/openai.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import orjson

from loadtest.emulator.replies import Reply
from loadtest.emulator.wire import FINGERPRINT, ApiError, GenerationParams, Head, Usage

DONE: Final = b"data: [DONE]\n\n"


class ChunkAnswer:
    """Writes an answer of one or more choices, see answers.AnswerWriter.

    Args:
        prompts: The ids of each choice's prompt.
    """

    def __init__(
        self,
        head: Head,
        params: GenerationParams,
        replies: Sequence[Reply],
        prompts: Sequence[list[int]],
    ) -> None:
        self._head = head
        self._is_chat = head.api == "chat"
        self._params = params
        self._replies = replies
        self._prompts = prompts if params.return_token_ids else [None] * len(prompts)

    def start(self) -> bytes:
        return b""

    def failure(self, error: ApiError) -> bytes:
        # As vLLM does it: the role first, then the error, and the end.
        opening = self._role(0, None) if self._is_chat else b""
        return opening + b"data: " + error.body + b"\n\n" + DONE

    def tokens(self, index: int, start: int, stop: int, usage: Usage | None) -> bytes:
        reply = self._replies[index]
        ends = stop == len(reply.ids)
        chunks = [self._role(index, usage)] if self._is_chat and start == 0 else []
        contents = self._contents(reply, start, stop)
        for number, content in enumerate(contents, start=1):
            is_last = ends and number == len(contents)
            choice: dict[str, Any] = {"index": index, **content, "logprobs": None}
            choice["finish_reason"] = reply.finish_reason if is_last else None
            if is_last or not self._is_chat:
                choice["stop_reason"] = reply.stop_reason if is_last else None
            if not self._is_chat:
                choice["prompt_token_ids"] = self._prompts[index] if start == 0 else None
            returns_ids = self._params.return_token_ids
            choice["token_ids"] = reply.ids[start:stop] if returns_ids else None
            more = self._usage(usage)
            if is_last and not self._params.include_usage:
                more["system_fingerprint"] = FINGERPRINT
            chunks.append(self._chunk([choice], **more))
        return b"".join(chunks)

    def end(self, usage: Usage) -> bytes:
        aborted = b""
        if self._is_chat:  # a completion says nothing of it
            indices = [i for i, reply in enumerate(self._replies) if not reply.ids]
            aborted = b"".join(self._role(i, None) + self._aborted(i) for i in indices)
        if not self._params.include_usage:
            return aborted + DONE
        return (
            aborted
            + self._chunk([], usage=usage.last_chunk(), system_fingerprint=FINGERPRINT)
            + DONE
        )

    def whole(self, usage: Usage) -> bytes:
        choices = [self._whole_choice(index) for index in range(len(self._replies))]
        prompt = {"prompt_logprobs": None, "prompt_token_ids": self._prompts[0]}
        return orjson.dumps(
            {
                "id": self._head.id,
                "object": "chat.completion" if self._is_chat else "text_completion",
                "created": self._head.created,
                "model": self._head.model,
                "choices": choices,
                "service_tier": None,
                "system_fingerprint": FINGERPRINT,
                "usage": usage.full(),
                **(prompt | {"prompt_text": None} if self._is_chat else {}),
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "metrics": None,
            }
        )

    def _whole_choice(self, index: int) -> dict[str, Any]:
        reply = self._replies[index]
        prompt = {"prompt_logprobs": None, "prompt_token_ids": self._prompts[index]}
        return {
            "index": index,
            **({"message": _message(reply)} if self._is_chat else {"text": reply.text()}),
            "logprobs": None,
            "finish_reason": reply.finish_reason,
            "stop_reason": reply.stop_reason,
            "token_ids": reply.ids if self._params.return_token_ids else None,
            **({} if self._is_chat else prompt),
            "routed_experts": None,
        }

    def _aborted(self, index: int) -> bytes:
        return self._chunk([{"index": index, "delta": {}, "finish_reason": "abort"}])

    def _role(self, index: int, usage: Usage | None) -> bytes:
        """Open a chat choice; `usage` is written with nothing generated yet."""
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        prompt = {"prompt_token_ids": self._prompts[index], "prompt_text": None}
        before = None if usage is None else usage.before_any()
        return self._chunk([choice], **self._usage(before), **prompt)

    def _contents(self, reply: Reply, start: int, stop: int) -> list[dict[str, Any]]:
        """Write the deltas or the text of tokens [start, stop); none: nothing to send yet."""
        if not self._is_chat:
            return [{"text": reply.text(start, stop)}]
        call = reply.tool_call
        if call is None:
            return [{"delta": {"content": reply.text(start, stop)}}]
        parts: list[dict[str, Any]] = []
        if start < call.start <= stop:
            parts.append({"id": call.id, "type": "function", "function": {"name": call.name}})
        if arguments := reply.arguments(start, stop):
            parts.append({"function": {"arguments": arguments}})
        deltas: list[dict[str, Any]] = [
            {"delta": {"content": None, "tool_calls": [part | {"index": 0}]}} for part in parts
        ]
        return [*deltas, {"delta": {}}] if stop == len(reply.ids) else deltas

    def _usage(self, usage: Usage | None) -> dict[str, Any]:
        if usage is None:
            return {}
        details = {"completion_tokens_details": None} if self._is_chat else {}
        return {"usage": usage.counts() | details}

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        chunk = {
            "id": self._head.id,
            "object": "chat.completion.chunk" if self._is_chat else "text_completion",
            "created": self._head.created,
            "model": self._head.model,
            "choices": choices,
        }
        return b"data: %b\n\n" % orjson.dumps(chunk | more)


def _message(reply: Reply) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": reply.text()}
    message |= dict.fromkeys(("refusal", "annotations", "audio", "function_call"))
    if reply.tool_call is not None:
        function = {"name": reply.tool_call.name, "arguments": reply.arguments()}
        call = {"id": reply.tool_call.id, "type": "function", "function": function}
        message["tool_calls"] = [call]
    return message | {"reasoning": None}
