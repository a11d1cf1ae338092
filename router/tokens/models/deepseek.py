"""The common parts of DeepSeek V3.2, V4 and V4.1: tokens, tools, calls and the renderer.

These models have no Jinja template. The engine renders their chats by its own rules, which
`deepseek_v32` and `deepseek_v4` follow. Sources: vLLM 0.32.0, in tokenizers/ and renderers/ the
files of these names, and those with `_encoding`.
"""

from __future__ import annotations

import functools
import json
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from router.api.openai import ChatRequest, Json
from router.base.engines import V0_32, Release
from router.base.errors import TemplateFailed
from router.tokens.conversation import Conversation, JsonMemo, build_conversation
from router.tokens.encoder import TextEncoder
from router.tokens.model_files import ModelFiles
from router.tokens.needs_engine import NeedsEngine
from router.tokens.prompter import Prompter
from router.tokens.template_probes import ContentFormat
from router.tokens.templates import Renderer, continued_and_begun, template_arguments

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"

Message = dict[str, Any]


class Printers(NamedTuple):
    """Writes a tool's definition, and a call's arguments."""

    tool: Callable[[Message], str]
    arguments: Callable[[Message], str]


class DeepSeekRenderer(Renderer):
    """Renders chat requests of a DeepSeek model.

    Args:
        given: See `Renderer`.
        release: The engine's.

    Encoding ignores `add_generation_prompt`, `continue_final_message` and `documents`.

    printers: Remember what they wrote of remembered values.
    tag_prefix: Stands before the name in the tags of calls.
    """

    content_format: ContentFormat
    tag_prefix = ""

    __slots__ = ("_release", "printers")

    def __init__(self, given: str | None = None, release: Release = V0_32) -> None:
        super().__init__(given)
        self._release = release
        arguments = functools.partial(_arguments, f"{DSML}{self.tag_prefix}parameter")
        self.printers = Printers(self._memo.wrap(_tool), self._memo.wrap(arguments))

    def parts(self, request: ChatRequest, memo: JsonMemo, by_the_book: bool) -> Sequence[str]:
        if request.engine_only is not None:
            raise NeedsEngine("field", request.engine_only)
        if request.chat_template is not None:
            raise NeedsEngine("request_template")
        if not request.messages:
            raise NeedsEngine("message", "none")
        if request.continue_final_message and request.add_generation_prompt:
            raise continued_and_begun()
        arguments = template_arguments(request, memo)
        if "self" in arguments:
            raise NeedsEngine("field", "chat_template_kwargs.self")
        tools = arguments.pop("tools")
        conversation = self.read(request.messages, memo)
        try:
            return [self.write(conversation, tools or None, arguments)]
        except RecursionError as exc:
            raise NeedsEngine("arguments", "too deep") from exc

    def read(self, messages: Sequence[Json], memo: JsonMemo) -> Conversation:
        """Rebuild the messages.

        Raises:
            NeedsEngine: it is not certain how the engine reads one.
            TemplateFailed: the rules refuse one.
        """
        return build_conversation(messages, self.content_format, memo)

    @abstractmethod
    def write(
        self, conversation: Conversation, tools: Sequence[Message] | None, arguments: dict[str, Any]
    ) -> str:
        """Write the prompt of a conversation.

        Args:
            arguments: The request's template arguments.

        Raises:
            TemplateFailed: the rules refuse the messages.
        """


def load_deepseek(files: ModelFiles, renderer: type[DeepSeekRenderer], max_bytes: int) -> Prompter:
    """Load a model whose chats `renderer` renders.

    Raises:
        NeedsEngine: its tokenizer cannot be used here.
    """
    tokenizer = files.tokenizer(has_class=False)
    encoder = TextEncoder(tokenizer.backend_tokenizer, f"{BOS}{EOS}{USER}{ASSISTANT}")
    return Prompter(encoder, renderer(files.template, files.release), max_bytes=max_bytes)


def to_json(value: Any) -> str:
    """Write JSON as the engine does: spaces after separators, text as it is."""
    return json.dumps(value, ensure_ascii=False)


def _tool(tool: Message) -> str:
    return to_json(tool["function"])


def _arguments(tag: str, arguments: Message) -> str:
    return "\n".join([_parameter(tag, key, value) for key, value in arguments.items()])


def _parameter(tag: str, key: str, value: Any) -> str:
    is_text = type(value) is str
    kind, text = ("true", value) if is_text else ("false", to_json(value))
    return f'<{tag} name="{key}" string="{kind}">{text}</{tag}>'


def calls_block(calls: Sequence[Message], name: str, printers: Printers, prefix: str = "") -> str:
    """Write an assistant's calls as one DSML block.

    Args:
        name: Of the tag around them.
        prefix: The renderer's `tag_prefix`.
    """
    block, invoke = f"{DSML}{prefix}{name}", f"{DSML}{prefix}invoke"
    lines = [f"\n\n<{block}>"]
    for call in calls:
        function = call["function"]
        lines.append(f'<{invoke} name="{function["name"]}">')
        lines.append(printers.arguments(function["arguments"]))
        lines.append(f"</{invoke}>")
    lines.append(f"</{block}>")
    return "\n".join(lines)


def last_user(conversation: Sequence[Message]) -> int:
    """Find the last message of a user or developer; -1: there is none."""
    for index in range(len(conversation) - 1, -1, -1):
        if conversation[index]["role"] in ("user", "developer"):
            return index
    return -1


def refused(reason: str) -> TemplateFailed:
    """Return the error for messages that the encoding refuses."""
    return TemplateFailed(f"DeepSeek's encoding takes no {reason}", param="messages")
