"""OpenAI's requests as the router sees them: a read-only view of what decides the prompt.

The engine gets the client's own bytes; this view only serves to compute the tokens that it makes
of them. The engine checks the fields that the router does not read. Messages, tools and
template arguments stay plain JSON values, because a chat template can distinguish an absent key
from a null one.

Errors name the field. What the engine accepts but only the engine can turn into tokens is no error:
`engine_only` has the reason. Source of the fields: vLLM 0.32.0, entrypoints/openai/chat_completion/
protocol.py and entrypoints/openai/completion/protocol.py.

`Limit` refuses prompts that are too long for a model. Sizes prove it: every token id is one token,
and a message or a tool is at least one token. A token has at most as many characters as the longest
one in the vocabulary. Other prompts pass, and the engine counts. Errors have vLLM's words (0.32.0,
renderers/params.py, TokenizeParams).
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

from msgspec import Struct

from router.api.body import TRUE, bool_of, int_of, object_of, objects_of, text_of, wrong
from router.base.errors import BadRequest

Json = Mapping[str, Any]
"""A decoded JSON object."""

if TYPE_CHECKING:
    TokenIds = array[int]
else:
    TokenIds = array  # subscriptable from Python 3.12 on
"""Token ids as `array("I")`: 4 bytes each."""


class ChatRequest(Struct, frozen=True, kw_only=True):
    """What decides the prompt of `/v1/chat/completions`, and a few fields the router acts on.

    Also what the engine makes of a request of another API (router.api.anthropic).

    messages: As sent, each with a string `role`.
    tools: As sent; None: no tools.
    max_tokens: `max_completion_tokens`, else `max_tokens`; None: up to the engine.
    renders_as: Which of the engine's ways to a prompt it takes; they differ in the order of a
        call's fields, and wherever no Jinja template renders.
    responses_body: What it was made of by the Responses API; None: it is of another API.
    truncates: The engine cuts a prompt that is too long instead of refusing it.
    template_defaults: The engine's `--default-chat-template-kwargs`; set where the prompt is made.
    has_inline_system: System messages come behind the first one; for some templates the engine's
        Messages API puts them into one in front.
    is_thinking_disabled: `reasoning_effort` is "none"; for some templates that API says "low".
    reads_cache: The engine looks into its prefix cache; not if it has to say how likely the prompt
        is (vLLM 0.32.0 sampling_params.py, skip_reading_prefix_cache).
    shows_media: Render images as what stands for them in the text; False: it is not
        known what does, and only the engine can make a prompt with them.
    engine_only: Why only the engine can make the prompt; None: it can be made here.
    """

    model: str | None
    messages: Sequence[Json]
    tools: Sequence[Json] | None = None
    tool_choice: str | Json | None = None
    documents: Sequence[Json] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: Json | None = None
    template_defaults: Json | None = None
    has_inline_system: bool = False
    is_thinking_disabled: bool = False
    shows_media: bool = False
    reads_cache: bool = True
    cache_salt: str | None = None
    max_tokens: int | None = None
    n: int = 1
    stream: bool = False
    stream_options: Json | None = None
    renders_as: Literal["chat", "responses"] = "chat"
    truncates: bool = False
    responses_body: Json | None = None
    engine_only: str | None = None

    @property
    def has_tool_choice(self) -> bool:
        """Whether the model may call tools: an engine without a parser for them refuses it."""
        return self.tool_choice not in (None, "none")

    @property
    def num_items(self) -> int:
        """Count what a template goes through one by one: messages, parts, calls, tools.

        A tool counts as ten, every 2,000 characters of a call's arguments as one more.
        """
        num_items = len(self.messages) + 10 * len(self.tools or ()) + len(self.documents or ())
        for message in self.messages:
            content = message.get("content")
            if type(content) is list:
                num_items += len(content)
            if "tool_calls" in message:
                num_items += _num_call_items(message["tool_calls"])
        return num_items


class CompletionRequest(Struct, frozen=True, kw_only=True):
    """What decides the prompts of `/v1/completions`.

    prompts: Each a text or its token ids (`array("I")`); several only if a batch was sent.
    reads_cache: As in a `ChatRequest`.
    """

    model: str | None
    prompts: tuple[str | TokenIds, ...]
    add_special_tokens: bool = True
    reads_cache: bool = True
    cache_salt: str | None = None
    max_tokens: int | None = None
    n: int = 1
    stream: bool = False
    stream_options: Json | None = None
    engine_only: str | None = None


def _num_call_items(calls: object) -> int:
    if type(calls) is not list:
        return 0
    num_items = len(calls)
    for call in calls:
        function = call.get("function") if type(call) is dict else None
        arguments = function.get("arguments") if type(function) is dict else None
        num_items += len(arguments) // 2000 if type(arguments) is str else 0
    return num_items


def parse_chat(body: Json) -> ChatRequest:
    """View a decoded body as a chat request.

    Raises:
        BadRequest: a field that decides the prompt is missing or of the wrong type.
    """
    max_tokens = int_of(body, "max_completion_tokens")
    messages, odd = _messages(body)
    tools = _tools(body)
    if tools is not None and not tools:
        odd = "tools"  # vLLM 0.32 refuses an empty list; other engines take it
    return ChatRequest(
        model=text_of(body, "model"),
        messages=messages,
        tools=tools,
        tool_choice=_tool_choice(body),
        documents=objects_of(body, "documents"),
        reasoning_effort=text_of(body, "reasoning_effort"),
        add_generation_prompt=bool_of(body, "add_generation_prompt", True),
        continue_final_message=bool_of(body, "continue_final_message", False),
        add_special_tokens=bool_of(body, "add_special_tokens", False),
        chat_template=text_of(body, "chat_template"),
        chat_template_kwargs=object_of(body, "chat_template_kwargs"),
        reads_cache=_reads_cache(body, body.get("top_logprobs", 0)),
        cache_salt=text_of(body, "cache_salt"),
        max_tokens=int_of(body, "max_tokens") if max_tokens is None else max_tokens,
        n=int_of(body, "n") or 1,
        stream=bool_of(body, "stream", False, nullable=True),
        stream_options=object_of(body, "stream_options"),
        engine_only=odd or _engine_only(body, ("mm_processor_kwargs", "media_io_kwargs")),
    )


def view_fields(body: Json) -> ChatRequest:
    """View the fields that all chat-like APIs have in common: all but the conversation.

    Raises:
        BadRequest: a field that routing needs is of the wrong type.
    """
    max_tokens = body.get("max_tokens")
    return ChatRequest(
        model=text_of(body, "model"),
        messages=(),
        cache_salt=text_of(body, "cache_salt"),
        max_tokens=max_tokens if type(max_tokens) is int else None,
        stream=bool_of(body, "stream", False, nullable=True),
        engine_only=_reused_ids(body),
    )


def parse_completion(body: Json) -> CompletionRequest:
    """View a decoded body as a completion request.

    Raises:
        BadRequest: a field that decides the prompts is missing or of the wrong type.
    """
    prompts = _prompts(body)
    odd = None if prompts else "prompt"
    return CompletionRequest(
        model=text_of(body, "model"),
        prompts=prompts,
        add_special_tokens=bool_of(body, "add_special_tokens", True),
        reads_cache=_reads_cache(body, body.get("logprobs")),
        cache_salt=text_of(body, "cache_salt"),
        max_tokens=int_of(body, "max_tokens"),
        n=int_of(body, "n") or 1,
        stream=bool_of(body, "stream", False, nullable=True),
        stream_options=object_of(body, "stream_options"),
        engine_only=_engine_only(body, ("prompt_embeds", "suffix")) or odd,
    )


def _reads_cache(body: Json, num_logprobs: object) -> bool:
    """Return whether nothing is to be said of the prompt's tokens; `num_logprobs`: if it echoes."""
    if body.get("prompt_logprobs") is not None:
        return False
    echoes = str(body.get("echo")).lower() in TRUE
    return num_logprobs is None or not echoes


def _engine_only(body: Json, fields: tuple[str, ...]) -> str | None:
    """Name the first field with which only the engine can make the prompt."""
    for field in (*fields, "truncate_prompt_tokens"):
        if body.get(field) is not None:
            return field
    return _reused_ids(body)


def _reused_ids(body: Json) -> str | None:
    """Name the field that brings the prompt's ids, if it is there."""
    transfer = body.get("kv_transfer_params")
    if isinstance(transfer, dict) and transfer.get("prompt_token_ids") is not None:
        return "kv_transfer_params.prompt_token_ids"
    return None


def _messages(body: Json) -> tuple[Sequence[Json], str | None]:
    """Read the messages; the second says why only the engine knows what it makes of them."""
    odd = None
    messages = body.get("messages")
    if not isinstance(messages, list):
        wrong("messages", "a list of objects", messages, missing="messages" not in body)
    for index, message in enumerate(messages):
        if type(message) is not dict:
            wrong(f"messages[{index}]", "an object", message)
        if type(message.get("role")) is not str:
            role = message.get("role")
            wrong(f"messages[{index}].role", "a string", role, missing="role" not in message)
        content = message.get("content")
        if type(content) is not str and content is not None and type(content) is not list:
            if type(content) is not dict:
                wrong(f"messages[{index}].content", "a string or a list of parts", content)
            odd = "content"  # the engine takes an object for the list of its keys
    return messages, odd


def _tools(body: Json) -> Sequence[Json] | None:
    tools = objects_of(body, "tools")
    if tools is None:
        return None
    for index, tool in enumerate(tools):
        function = tool.get("function")
        if not isinstance(function, dict):
            wrong(f"tools[{index}].function", "an object", function)
        if not isinstance(function.get("name"), str):
            wrong(f"tools[{index}].function.name", "a string", function.get("name"))
    return tools


def _tool_choice(body: Json) -> str | Json | None:
    choice = body.get("tool_choice")
    if choice is not None and not isinstance(choice, str | dict):
        wrong("tool_choice", '"none", "auto", "required" or an object', choice)
    return choice


def _prompts(body: Json) -> tuple[str | TokenIds, ...]:
    prompt = body.get("prompt")
    if prompt is None and body.get("prompt_embeds") is not None:
        return ()
    if isinstance(prompt, str):
        return (prompt,)
    if prompt == []:
        return ()  # the engine's to judge
    if not isinstance(prompt, list):
        expected = "a string, token ids, or a list of strings or of lists of token ids"
        wrong("prompt", expected, prompt, missing="prompt" not in body)
    if isinstance(prompt[0], str | list):
        return tuple(_prompt(each, index) for index, each in enumerate(prompt))
    return (_token_ids(prompt, "prompt"),)


def _prompt(prompt: Any, index: int) -> str | TokenIds:
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list):
        wrong(f"prompt[{index}]", "a string or a list of token ids", prompt)
    return _token_ids(prompt, f"prompt[{index}]")


def _token_ids(ids: list[Any], param: str) -> TokenIds:
    try:
        return array("I", ids)
    except (TypeError, OverflowError):
        if any(isinstance(token, float) for token in ids):  # the engine takes 1.0 for 1
            whole = [int(i) if isinstance(i, float) and i.is_integer() else i for i in ids]
            if not any(isinstance(token, float) for token in whole):
                return _token_ids(whole, param)
        index = next(index for index, token in enumerate(ids) if not _is_token_id(token))
        wrong(f"{param}[{index}]", "a token id: a non-negative integer", ids[index])


def _is_token_id(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value < 2**32


_TRUNCATED: Final = "truncate_prompt_tokens"
_MAX_BYTES_PER_TOKEN: Final = 8  # in the mean of a whole prompt; text has about 4
_MAX_TOKENS: Final = 1_000_000  # where the engine does not say what it takes at most


class Limit(Struct, frozen=True, kw_only=True):
    """How long a request's prompt may be.

    What is refused costs nothing more. Another prompt that is far too long is not tokenized, since
    that would keep others waiting (about 0.2 s a megabyte): the engine will refuse it.

    max_tokens: What the model takes (`max_model_len`). None: not known.
    max_chars_per_token: Of its vocabulary. None: not known here.
    is_proven: The tokens here are known to be the engine's, so a text may be refused by them.
    is_cut: The engine truncates the prompt instead of refusing it.
    """

    max_tokens: int | None = None
    max_chars_per_token: int | None = None
    is_proven: bool = False
    is_cut: bool = False

    def check(self, request: ChatRequest | CompletionRequest) -> None:
        """Refuse a request by its sizes, before anything is made of it.

        Raises:
            BadRequest: it is surely too long.
        """
        most = self.max_tokens
        if most is None or self.is_cut:
            return
        if isinstance(request, ChatRequest):
            for param, items in (("messages", request.messages), ("tools", request.tools)):
                if items is not None and len(items) > most:
                    raise _too_many_items(param, len(items), most)
            return
        ids = max((len(each) for each in request.prompts if not isinstance(each, str)), default=0)
        if ids > most:
            raise _too_many_tokens(ids, most)
        chars = max((len(each) for each in request.prompts if isinstance(each, str)), default=0)
        if self.max_chars_per_token is not None and chars > most * self.max_chars_per_token:
            raise _too_many_chars(chars, most, self.max_chars_per_token)

    @property
    def max_chars(self) -> int:
        """The characters of the longest text that is tokenized here."""
        return (self.max_tokens or _MAX_TOKENS) * _MAX_BYTES_PER_TOKEN

    def takes_text(self, num_chars: int) -> bool:
        """Return whether a prompt of so many characters is tokenized here.

        Raises:
            BadRequest: it is surely too long, and may be refused.
        """
        most, per_token = self.max_tokens, self.max_chars_per_token
        if self.is_proven and most is not None and per_token is not None:
            if num_chars > most * per_token:
                raise _too_many_chars(num_chars, most, per_token)
        return num_chars <= self.max_chars

    def takes_tokens(self, num_tokens: int) -> bool:
        """Return whether so many tokens are worth knowing; of a prompt that is cut one less.

        Raises:
            BadRequest: they are too many, and may be refused.
        """
        most = self.max_tokens
        if num_tokens <= (most or _MAX_TOKENS) - self.is_cut:
            return True
        if self.is_proven and most is not None:
            raise _too_many_tokens(num_tokens, most)
        return False


def is_cut(request: ChatRequest | CompletionRequest) -> bool:
    """Return whether an engine truncates a request's prompt instead of refusing it."""
    if isinstance(request, ChatRequest):
        return request.truncates
    return request.engine_only == _TRUNCATED


def _too_many_items(param: str, num_items: int, max_tokens: int) -> BadRequest:
    return BadRequest(
        f"This model's maximum context length is {max_tokens} tokens. However, `{param}` "
        f"has {num_items} items. Please reduce their number.",
        param=param,
    )


def _too_many_tokens(num_tokens: int, max_tokens: int) -> BadRequest:
    return BadRequest(
        f"This model's maximum context length is {max_tokens} tokens. However, your prompt "
        f"contains {num_tokens} input tokens, which exceeds this limit even without any output "
        "tokens. Please reduce the length of the input prompt.",
        param="input_tokens",
    )


def _too_many_chars(num_chars: int, max_tokens: int, max_chars_per_token: int) -> BadRequest:
    most = max_tokens * max_chars_per_token
    return BadRequest(
        f"This model's maximum context length is {max_tokens} tokens. However, your prompt "
        f"contains {num_chars} characters (more than {most} characters, which is the upper "
        f"bound for {max_tokens} input tokens). Please reduce the length of the input prompt.",
        param="input_text",
    )
