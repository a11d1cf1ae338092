"""Mistral's own tokenizers: from a chat request to special tokens and the texts between them.

The engine renders these chats by the rules of Mistral's library (the extra `mistral`), which puts
special tokens between texts that are encoded one by one. Here those rules run with a tokenizer that
only writes the texts down. So what a turn repeats is not encoded again. By the book, the library
itself encodes, and the prompt has ids only.

If the library refuses a request, it is left to the engine, which may have another release.
Releases 1.11.6, 1.12.0 and 1.13.1 gave the same ids whenever they gave any.

Source: vLLM 0.32.0, renderers/mistral.py, tokenizers/mistral.py, renderers/online_renderer.py
(render_chat); transformers 5.19, tokenization_mistral_common.py (apply_chat_template).

Token ids are those of Mistral's own tokenizers. A text is encoded in one call, as the engine does.
Prompts are cut at special tokens only, which no text contains. Source: vLLM 0.32.0,
tokenizers/mistral.py (encode, max_chars_per_token); mistral-common 1.13,
tokens/tokenizers/tekken.py, sentencepiece.py.
"""

from __future__ import annotations

import copy
import os
import threading
from array import array
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import orjson
from mistral_common.protocol.instruct.normalize import get_normalizer
from mistral_common.protocol.instruct.request import ChatCompletionRequest, ReasoningEffort
from mistral_common.protocol.instruct.validator import ValidationMode, get_validator
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from mistral_common.tokens.tokenizers.utils import (
    download_tokenizer_from_hf_hub,
    get_one_valid_tokenizer_file,
)

from router.api.openai import ChatRequest, Json, TokenIds
from router.base.bounded import Bounded
from router.base.errors import TemplateFailed
from router.tokens.boundaries import IdCuts
from router.tokens.conversation import (
    JsonMemo,
    check_calls,
    check_message,
    reasoning_of,
    text_parts,
)
from router.tokens.encoder import Framed, FramedEncoder, PlainEncoder
from router.tokens.model_files import ModelFiles
from router.tokens.needs_engine import NeedsEngine, is_failure
from router.tokens.prompt_tree import NewSegment
from router.tokens.prompter import Prompter
from router.tokens.templates import Renderer, template_arguments

_MAX_FILE_BYTES: Final = 256 << 20  # tekken.json has 20 MB


def load_tokenizer(model: str, *, local_files_only: bool = False) -> MistralTokenizer:
    """Load a model's tokenizer; blocking, for a second.

    Raises:
        NeedsEngine: it is missing, or cannot be used here.
    """
    try:
        if Path(model).is_dir():
            path = Path(model, get_one_valid_tokenizer_file(os.listdir(model)))
        else:
            path = Path(download_tokenizer_from_hf_hub(model, local_files_only=local_files_only))
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise NeedsEngine("model", f"{path.name} is too large")
        return MistralTokenizer.from_file(path)
    except NeedsEngine:
        raise
    except BaseException as exc:  # whatever a broken file makes a library raise
        raise _failure(exc, "model") from exc


class MistralTextEncoder(PlainEncoder):
    """Encodes texts whole. No text contains special tokens."""

    __slots__ = ("_tokenizer",)

    def __init__(self, tokenizer: MistralTokenizer) -> None:
        self._tokenizer: Any = tokenizer.instruct_tokenizer.tokenizer
        longest = max(map(len, self._tokenizer.vocab()), default=1)
        super().__init__(longest, array("I", [self._tokenizer.bos_id]), array("I"))

    def cuts(self, data: bytes) -> IdCuts:
        return IdCuts(0)

    def encode(self, data: bytes, new: Sequence[NewSegment], suffix: TokenIds) -> list[TokenIds]:
        return [self.encode_text(data[segment.start : segment.end].decode()) for segment in new]

    def encode_whole(self, text: str, *, add_special_tokens: bool) -> TokenIds:
        ids = self.encode_text(text)
        return array("I", [self._tokenizer.bos_id]) + ids if add_special_tokens else ids

    def encode_text(self, text: str) -> TokenIds:
        """Encode a text without special tokens; raises as `encode`."""
        try:
            return array("I", self._tokenizer.encode(text, bos=False, eos=False))
        except BaseException as exc:  # its expressions have a limit, and one may panic
            raise _failure(exc, "encoder") from exc

    def texts_of(self, ids: Sequence[int]) -> list[str]:
        return [str(self._tokenizer.decode([each])) for each in ids]


class MistralEncoder(FramedEncoder):
    """Encodes texts behind special tokens, by their ids."""

    __slots__ = ("_texts",)

    def __init__(self, texts: MistralTextEncoder) -> None:
        self._texts = texts

    def encode(self, parts: Sequence[Framed]) -> TokenIds:
        ids: TokenIds = array("I")
        for part in parts:
            ids.extend(part.header)
            for each in part.texts:
                ids += self._texts.encode_text(each)
        return ids


def _failure(exc: BaseException, reason: str) -> BaseException:
    """Return the error to raise: an interrupt stays one."""
    if not is_failure(exc):
        return exc
    return NeedsEngine(reason, f"Mistral's tokenizer: {type(exc).__name__}")


_CALL_ID_CHARS = 9
_EFFORTS = frozenset(effort.value for effort in ReasoningEffort)
_WITH_EFFORT: Final = 15  # the first version whose prompts show an effort
_MAX_TOOL_SETS = 64
_MAX_TOOLS_BYTES = 256 * 1024  # of a set that is remembered; the library's objects take more

_MAX_INLINE_ITEMS: Final = 100  # rendered on the loop: the library takes about 80 µs for each


def load(files: ModelFiles, max_bytes: int) -> Prompter:
    """Load a model's tokenizer and its rules; see `models`."""
    tokenizer = load_tokenizer(files.name, local_files_only=files.local_files_only)
    texts = MistralTextEncoder(tokenizer)
    return Prompter(
        texts,
        MistralRenderer(tokenizer, files.template),
        chat_encoder=MistralEncoder(texts),
        max_inline_items=_MAX_INLINE_ITEMS,
        max_bytes=max_bytes,
    )


class MistralRenderer(Renderer):
    """Renders chat requests of a model with Mistral's own tokenizer.

    Args:
        tokenizer: The library's.
        given: See `Renderer`.
    """

    __slots__ = ("_normalizer", "_tokenizer", "_tools", "_validator")

    def __init__(self, tokenizer: MistralTokenizer, given: str | None = None) -> None:
        super().__init__(given)
        text_tokenizer = tokenizer.instruct_tokenizer.tokenizer
        version = text_tokenizer.version
        self._tokenizer = tokenizer
        self._normalizer = get_normalizer(version, text_tokenizer.model_settings_builder)
        self._validator = get_validator(version, mode=ValidationMode.test)
        self._tools = _ToolSets(self._validator)

    def parts(self, request: ChatRequest, memo: JsonMemo, by_the_book: bool) -> Sequence[Framed]:
        """Render as `Renderer.parts` does.

        Tools are also remembered in other threads: the library takes 40 ms to check a set.
        """
        arguments = _arguments(request, memo)
        continues = bool(arguments.get("continue_final_message"))
        messages = _messages(request, memo)
        tools: list[Json] | None = arguments["tools"]
        options = {}
        version = self._tokenizer.instruct_tokenizer.tokenizer.version
        if version.version_num >= _WITH_EFFORT:
            options["reasoning_effort"] = arguments.get("reasoning_effort")
        try:
            if by_the_book:
                asked = ChatCompletionRequest.from_openai(
                    messages, tools, continue_final_message=continues, **options
                )
                return [Framed(self._tokenizer.encode_chat_completion(asked).tokens)]
            checked = self._tools.find(memo.owner, tools) if tools is not None else None
            asked = ChatCompletionRequest.from_openai(
                messages, continue_final_message=continues, **options
            )
            self._validator.validate_request(asked)
            asked.tools = checked
            writer = _Writer(self._tokenizer.instruct_tokenizer.tokenizer)
            instruct = copy.copy(self._tokenizer.instruct_tokenizer)
            instruct.tokenizer = writer
            normalized: Any = self._normalizer.from_chat_completion_request(asked)
            return writer.framed(instruct.encode_instruct(normalized).tokens)
        except RecursionError as exc:
            raise NeedsEngine("arguments", "too deep") from exc
        except Exception as exc:  # whatever the library refuses
            raise NeedsEngine("rules", type(exc).__name__) from exc


class _Writer:
    """Writes down the texts that a tokenizer would encode.

    Each text gets a number below 0. Other tokens are special ones.
    """

    __slots__ = ("_tokenizer", "texts")

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.texts: list[str] = []

    def encode(self, s: str, bos: bool, eos: bool) -> list[int]:
        if bos or eos:
            raise NotImplementedError
        self.texts.append(s)
        return [-len(self.texts)]

    def framed(self, tokens: Sequence[int]) -> list[Framed]:
        """Return what was written as special tokens, each run with the texts behind it."""
        parts: list[tuple[list[int], list[str]]] = []
        for is_special, run in groupby(tokens, lambda token: token >= 0):
            if is_special:
                parts.append((list(run), []))
            else:
                parts[-1][1].extend(self.texts[-token - 1] for token in run)
        return [Framed(*each) for each in parts]

    def decode(self, tokens: list[int], special_token_policy: Any = None) -> str:
        """Return no text: the library keeps a copy of the prompt, which is not needed."""
        return ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


class _ToolSets:
    """The checked tools of recent requests, as objects of the library; thread-safe."""

    __slots__ = ("_checked", "_lock", "_validator")

    def __init__(self, validator: Any) -> None:
        self._checked: Bounded[tuple[str, bytes], list[Any]] = Bounded(_MAX_TOOL_SETS)
        self._lock = threading.Lock()
        self._validator = validator

    def find(self, owner: str, tools: list[Json]) -> list[Any]:
        """Convert and check tools.

        Raises: as the library.
        """
        key = owner, orjson.dumps(tools)
        with self._lock:
            known = self._checked.use(key)
        if known is not None:
            return known
        messages = [{"role": "user", "content": ""}]
        asked = ChatCompletionRequest.from_openai(messages, tools)
        checked: list[Any] = self._validator.validate_request(asked).tools
        if len(key[1]) > _MAX_TOOLS_BYTES:
            return checked
        with self._lock:
            self._checked.put(key, checked)
        return checked


def _arguments(request: ChatRequest, memo: JsonMemo) -> dict[str, Any]:
    """Return the arguments that are rendered besides the messages.

    Raises:
        NeedsEngine, TemplateFailed: as `MistralRenderer.render`.
    """
    if request.engine_only is not None:
        raise NeedsEngine("field", request.engine_only)
    if request.chat_template is not None:
        raise NeedsEngine("request_template")
    if not request.messages:
        raise NeedsEngine("message", "none")
    if request.renders_as == "chat":
        if request.chat_template_kwargs is not None:
            raise TemplateFailed(
                "Mistral's tokenizers take no `chat_template_kwargs`", param="chat_template_kwargs"
            )
        effort = request.reasoning_effort
        if effort and effort not in _EFFORTS:
            raise NeedsEngine("rules", "reasoning_effort")
    arguments = template_arguments(request, memo)
    continues = bool(arguments.get("continue_final_message"))
    opens = bool(arguments.get("add_generation_prompt"))
    ends_in_answer = request.messages[-1]["role"] == "assistant"
    if (continues and (opens or not ends_in_answer)) or (opens and ends_in_answer):
        raise TemplateFailed(
            "a final message of the assistant must be continued, and no other can be:"
            " `continue_final_message` without `add_generation_prompt`",
            param="continue_final_message",
        )
    return arguments


def _messages(request: ChatRequest, memo: JsonMemo) -> list[dict[str, Any]]:
    """Rebuild the messages for the library.

    Raises:
        NeedsEngine: as `MistralRenderer.render`.
    """
    by_chat = request.renders_as == "chat"
    return [_message(message, memo, by_chat) for message in request.messages]


def _message(message: Json, memo: JsonMemo, by_chat: bool) -> dict[str, Any]:
    """Rebuild a message. The Responses API cuts no ids, and its kinds of parts have no rule.

    Raises:
        NeedsEngine: as `MistralRenderer.render`.
    """
    check_message(message)
    role, content = message["role"], message.get("content")
    if type(content) is list:
        if content and not by_chat:
            raise NeedsEngine("rules", "input_text")
        content = [{"type": "text", "text": part["text"]} for part in text_parts(message)]
    rebuilt: dict[str, Any] = {"role": role, "content": content}
    if role == "assistant":
        rebuilt["tool_calls"] = _calls(message, memo, by_chat)
        rebuilt["reasoning"] = reasoning_of(message)
    elif role == "tool":
        call_id = message.get("tool_call_id")
        if type(call_id) is not str:
            raise NeedsEngine("message", "tool_call_id")
        rebuilt["tool_call_id"] = call_id[-_CALL_ID_CHARS:] if by_chat else call_id
        rebuilt["name"] = message.get("name")
    return rebuilt


def _calls(message: Json, memo: JsonMemo, by_chat: bool) -> list[dict[str, Any]]:
    """Rebuild a message's calls.

    Raises:
        NeedsEngine: it is not certain how the engine reads them.
    """
    calls = message.get("tool_calls")
    if calls is None:
        if "tool_calls" in message:
            raise NeedsEngine("tool_calls", "null")
        return []
    return [
        {
            "id": call["id"][-_CALL_ID_CHARS:] if by_chat else call["id"],
            "type": "function",
            "function": {
                "name": call["function"]["name"],
                "arguments": memo.arguments(call["function"]["arguments"]),
            },
        }
        for call in check_calls(calls)
    ]
