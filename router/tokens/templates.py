"""Render a chat request: the prompt that the engine encodes.

`Renderer` is the interface of a family of models: `parts(request)`. Jinja templates are rendered
here, the rules of other families are in `models`. There is one `ChatRenderer` per model, with its
templates and the engine's options for them. It renders as vLLM and transformers do together.
Sources: vLLM 0.32.0, renderers/hf.py (safe_apply_chat_template), renderers/online_renderer.py
(render_chat); transformers 5.19, utils/chat_template_utils.py (render_jinja_template).

Sources of the template's arguments, besides the messages: vLLM 0.32.0,
entrypoints/openai/chat_completion/protocol.py (build_chat_params), renderers/params.py
(merge_kwargs).

The sandbox has shortcuts for common operations. transformers renders in jinja's
ImmutableSandboxedEnvironment. There, every `message.role` raises and catches an AttributeError, and
every `content.strip()` runs a chain of checks. The subclass here answers the harmless cases at
once, and leaves all others to its parent: same values, same errors, same refusals. 171 messages,
385 KB, a Qwen3 template: 4.2 -> 1.1 ms.

The cases, and why the parent gives the same answer:

1. A dict's key that is no dict attribute: the parent fails at getattr, then subscribes.
2. A str method other than format and format_map: public, not mutating, so the parent allows it.
3. A public property of a loop: the parent allows it, too.
4. A namespace's plain value (str, number, list, dict, None): the parent only checks the name, and
   namespaces return only values that the template stored.
5. A call of a str's own method: is_safe_callable is true of builtins, and the parent does nothing
   else with the context.
6. Case 1 of a plain name, `message.role` or `message['role']`, and case 3 of `loop` are compiled
   into the template.
"""

from __future__ import annotations

import datetime
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import BuiltinMethodType
from typing import Any, ClassVar

import jinja2.meta
from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from msgspec.structs import replace

from router.api.openai import ChatRequest, Json
from router.base.engines import V0_32, Release
from router.base.errors import TemplateFailed
from router.tokens.conversation import (
    Conversation,
    JsonMemo,
    build_conversation,
    build_tools,
    check_numbers,
    without_developer,
)
from router.tokens.encoder import Part
from router.tokens.needs_engine import NeedsEngine
from router.tokens.template_probes import (
    ContentFormat,
    detect_content_format,
    disabled_effort,
    wants_system_first,
    with_system_first,
)


class Renderer(ABC):
    """Renders chat requests of one model as the engine does.

    Args:
        given: The engine's `--chat-template`. A renderer without a template only uses it for the
            Messages API, as the engine does.

    is_dated: Whether prompts contain the engine's date.
    today: Returns the engine's date.
    efforts: The engine's `--reasoning-effort-map`.
    defaults: The engine's `--default-chat-template-kwargs`.
    """

    __slots__ = (
        "_disabled_effort",
        "_given",
        "_is_system_first",
        "_memo",
        "defaults",
        "efforts",
        "today",
    )

    is_dated: ClassVar[bool] = False

    def __init__(self, given: str | None = None) -> None:
        self._given = given
        self._memo = JsonMemo()
        self._is_system_first: bool | None = None  # None: not tried yet
        self._disabled_effort: str | None = None
        self.today: Callable[[], datetime.date] = datetime.date.today
        self.efforts: Mapping[str, str] = {}
        self.defaults: Json | None = None

    @abstractmethod
    def parts(self, request: ChatRequest, memo: JsonMemo, by_the_book: bool) -> Sequence[Part]:
        """Write a prompt: all parts are text, or all are framed.

        One wide character makes all of a text wide, and ten times slower to encode. Most parts
        have none.

        Args:
            memo: What is remembered for the request's owner; a new one if nothing may be.
            by_the_book: Render without shortcuts, to compare.

        Raises:
            NeedsEngine: only the engine knows how it renders the request.
            TemplateFailed: the template or the rules refuse the messages. The engine will
                answer 400.
            UnicodeEncodeError: a framed text is no Unicode.
        """

    def render(
        self,
        request: ChatRequest,
        *,
        by_the_book: bool = False,
        apart: bool = False,
        owner: str = "",
    ) -> Sequence[Part]:
        """Render a prompt; see `parts`.

        Threads other than the loop's must set `by_the_book` or `apart`.

        Args:
            apart: Remember nothing.
            owner: Whose request it is. Its `memo` speeds up only the same owner's requests.

        Raises:
            NeedsEngine, TemplateFailed: as `parts`.
        """
        memo = JsonMemo() if by_the_book or apart else self._memo
        try:
            return self.parts(request, memo.of(owner), by_the_book)
        except UnicodeEncodeError as exc:
            raise NeedsEngine("surrogate") from exc

    def adapted(self, request: ChatRequest) -> ChatRequest:
        """Change the fields that depend on the template, and set the engine's defaults.

        A request that depends on neither stays as it is. Each property of the template is tried
        out once.

        Raises:
            NeedsEngine: the template cannot be tried out here.
        """
        if request.has_inline_system:
            if self._is_system_first is None:
                self._is_system_first = self.wants_system_first()
            if self._is_system_first:
                messages = with_system_first(request.messages)
                request = replace(request, messages=messages, has_inline_system=False)
        if request.is_thinking_disabled:
            if self._disabled_effort is None:
                self._disabled_effort = disabled_effort(
                    partial(self.render, apart=True), self.efforts, self.defaults
                )
            request = replace(
                request, reasoning_effort=self._disabled_effort, is_thinking_disabled=False
            )
        if self.defaults is not None:
            request = replace(request, template_defaults=self.defaults)
        effort = request.reasoning_effort
        if effort is not None and effort in self.efforts:
            request = replace(request, reasoning_effort=self.efforts[effort])
        return request

    def use_format(self, content_format: ContentFormat) -> None:  # noqa: B027 (few have a choice)
        """Use the engine's `--chat-template-content-format`, if the renderer has a choice."""

    def wants_system_first(self) -> bool:
        """Return whether the Messages API joins all system messages into one in front.

        Raises:
            NeedsEngine: that depends on a template which is not known here.
        """
        try:
            return wants_system_first(self._given or "")
        except Exception as exc:  # whatever a template may raise
            raise NeedsEngine("template", type(exc).__name__) from exc


class NoRenderer(Renderer):
    """Stands for a chat template that cannot be used here: the engine has to render.

    Args:
        reason: Why.
    """

    __slots__ = ("reason",)

    def __init__(self, reason: str = "") -> None:
        super().__init__()
        self.reason = reason

    def parts(self, request: ChatRequest, memo: JsonMemo, by_the_book: bool) -> Sequence[Part]:
        raise NeedsEngine("model", self.reason)

    def adapted(self, request: ChatRequest) -> ChatRequest:
        if request.has_inline_system or request.is_thinking_disabled:
            raise NeedsEngine("model", self.reason)
        return request


# Parameters of transformers' apply_chat_template. As template arguments they would change its work.
_STEERING = frozenset(
    "chat_template tokenize conversation conversations messages tools documents padding truncation "
    "max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)


def template_arguments(request: ChatRequest, memo: JsonMemo) -> dict[str, Any]:
    """Merge the template's arguments. Later ones win; null and "auto" never do.

    The engine's defaults come first, then tools, then the request's own. The Responses route keeps
    a null or "auto" of the request's own arguments if the engine has no defaults.

    Raises:
        NeedsEngine: it is not known how the engine renders an argument.
    """
    given, defaults = request.chat_template_kwargs or {}, request.template_defaults or {}
    steering = _STEERING & (given.keys() | defaults.keys())
    if steering:
        raise NeedsEngine("field", f"chat_template_kwargs.{min(steering)}")
    if given:
        check_numbers(given)
    own = {
        "add_generation_prompt": request.add_generation_prompt,
        "continue_final_message": request.continue_final_message,
        "documents": _documents(request.documents) if request.documents is not None else None,
        "reasoning_effort": request.reasoning_effort,
    }
    if request.reasoning_effort is not None and "enable_thinking" not in given:
        own["enable_thinking"] = request.reasoning_effort != "none"
    merged = _merged(given, own)
    if request.renders_as == "responses":  # it merges them itself, and passes them as defaults
        defaults = _merged(defaults, merged) if defaults else merged
    tools = build_tools(request.tools, memo) if request.tools is not None else None
    return _merged({**defaults, "tools": tools}, merged)


def continued_and_begun() -> TemplateFailed:
    """Return the error for a request to continue its last message and to begin an answer."""
    return TemplateFailed(
        "`continue_final_message` and `add_generation_prompt` exclude each other: set the latter "
        "to false",
        param="continue_final_message",
    )


def _documents(documents: Sequence[Json]) -> list[Json]:
    for document in documents:
        if not all(isinstance(value, str) for value in document.values()):
            raise NeedsEngine("field", "documents")
    return list(documents)


def _merged(defaults: Json, overrides: Json) -> dict[str, Any]:
    return {
        **defaults,
        **{key: value for key, value in overrides.items() if value not in (None, "auto")},
    }


_DICT_ATTRIBUTES = frozenset(dir(dict))
_STR_METHODS = frozenset(
    name for name in dir(str) if not name.startswith("_") and name not in ("format", "format_map")
)
_LOOP_PROPERTIES = frozenset(
    name for name, value in vars(LoopContext).items() if isinstance(value, property)
) | {"index0", "depth0"}
_PLAIN_TYPES = frozenset({str, int, float, bool, type(None), list, dict})


def stock_template(source: str) -> Template:
    """Compile a chat template as transformers does, which remembers it.

    Uses a private function of transformers 5.19. For a release without it, the engine renders: it
    is not known how that release compiles templates.

    Raises:
        jinja2.TemplateSyntaxError: the template is not one.
        LookupError: transformers has no such function.
    """
    from transformers.utils import chat_template_utils

    try:
        template = chat_template_utils._compile_jinja_template(source)
    except (AttributeError, TypeError) as exc:
        raise LookupError("transformers compiles templates in another way") from exc
    if not isinstance(template, Template):
        raise LookupError("transformers compiles templates to something else")
    return template


def compile_template(source: str, memo: JsonMemo) -> Template:
    """Compile a chat template just as transformers does, into the faster sandbox.

    Raises: as `stock_template`.
    """
    theirs: Environment = stock_template(source).environment
    if type(theirs) is not ImmutableSandboxedEnvironment:
        return theirs.from_string(source)  # a release that does it differently
    ours = theirs.overlay()
    ours.__class__ = FastSandbox
    ours.filters = {**theirs.filters, "tojson": memo.wrap(theirs.filters["tojson"])}
    template = ours.from_string(source)
    template.globals = dict(template.globals)  # each rendering copies it, a ChainMap in 20 us
    return template


class _FastCode(CodeGenerator):
    """Compiles a dict's key of a name to a subscript, everything else as jinja does."""

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:  # noqa: N802
        if isinstance(node.node, nodes.Name) and node.attr not in _DICT_ATTRIBUTES:
            if node.node.name == "loop" and node.attr in _LOOP_PROPERTIES:
                self._property(node.node, node.attr, frame)
            else:
                self._subscript(node.node, node.attr, "getattr", frame)
        else:
            super().visit_Getattr(node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        key = node.arg.value if isinstance(node.arg, nodes.Const) else None
        if isinstance(node.node, nodes.Name) and type(key) is str:
            self._subscript(node.node, key, "getitem", frame)
        else:
            super().visit_Getitem(node, frame)

    def _property(self, name: nodes.Name, key: str, frame: Frame) -> None:
        self.write("(")
        self.visit(name, frame)
        self.write(f".{key} if type(")
        self.visit(name, frame)
        self.write(") is LoopContext else environment.getattr(")
        self.visit(name, frame)
        self.write(f", {key!r}))")

    def _subscript(self, name: nodes.Name, key: str, otherwise: str, frame: Frame) -> None:
        self.write("(")
        self.visit(name, frame)
        self.write(f"[{key!r}] if type(")
        self.visit(name, frame)
        self.write(f") is dict and {key!r} in ")
        self.visit(name, frame)
        self.write(f" else environment.{otherwise}(")
        self.visit(name, frame)
        self.write(f", {key!r}))")


class FastSandbox(ImmutableSandboxedEnvironment):
    """An ImmutableSandboxedEnvironment with the shortcuts of this module's charter."""

    code_generator_class = _FastCode

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)
        if kind is dict:
            if attribute not in _DICT_ATTRIBUTES:
                if attribute in obj:
                    return obj[attribute]
                return self.undefined(obj=obj, name=attribute)
        elif kind is str:
            if attribute in _STR_METHODS:
                return getattr(obj, attribute)
        elif kind is LoopContext:
            if attribute in _LOOP_PROPERTIES:
                return getattr(obj, attribute)
        elif kind is Namespace:
            try:
                value = getattr(obj, attribute)
            except AttributeError:
                return super().getattr(obj, attribute)
            if type(value) in _PLAIN_TYPES and not attribute.startswith("_"):
                return value
        return super().getattr(obj, attribute)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        if type(__obj) is BuiltinMethodType and type(__obj.__self__) is str:
            kwargs.pop("_loop_vars", None)
            kwargs.pop("_block_vars", None)
            return __obj(*args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)


FindTemplate = Callable[[bool], str]
Adapt = Callable[[dict[str, Any], JsonMemo], dict[str, Any]]

_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "
_DIRECTIVES = re.compile("%(.?)", re.DOTALL)
_DATES = frozenset("aAbBdjmyYuUVwWG%")
_PASSED = frozenset({"tools", "documents", "add_generation_prompt", "continue_final_message"})


class ChatTemplate:
    """A compiled chat template, and properties that the engine derives from its text."""

    __slots__ = ("accepted", "content_format", "is_dated", "knows_developer", "source", "template")

    def __init__(
        self,
        source: str,
        memo: JsonMemo,
        release: Release = V0_32,
        content_format: ContentFormat | None = None,
    ) -> None:
        self.source = source
        self.template: Template = compile_template(source, memo)
        tree = self.template.environment.parse(source)
        self.content_format = content_format or detect_content_format(tree, release)
        self.knows_developer = '"developer"' in source or "'developer'" in source
        self.accepted = jinja2.meta.find_undeclared_variables(tree) | _PASSED
        self.is_dated = "strftime_now" in source

    def stock(self) -> Template:
        """Return the template as transformers itself runs it."""
        return stock_template(self.source)


class ChatRenderer(Renderer):
    """Renders chat requests of one model.

    Args:
        find_template: Returns the template's text for requests with tools (True) or without.
            Raises LookupError if there is none.
        special_tokens: The tokenizer's `bos_token` and so on, which templates may use.
        adapt: Changes a template's arguments as the tokenizer's own code does; None: nothing.
        release: The engine's.
    """

    __slots__ = (
        "_adapt",
        "_content_format",
        "_find_template",
        "_release",
        "_special_tokens",
        "_templates",
    )

    def __init__(
        self,
        find_template: FindTemplate,
        special_tokens: Mapping[str, str],
        adapt: Adapt | None = None,
        release: Release = V0_32,
    ) -> None:
        super().__init__()
        self._content_format: ContentFormat | None = None
        self._adapt = adapt
        self._release = release
        self._find_template = find_template
        self._special_tokens = dict(special_tokens)
        self._templates: dict[bool, ChatTemplate] = {}

    @property
    def is_dated(self) -> bool:  # type: ignore[override]
        """Return whether a template asks for the date."""
        try:
            return any(self.template(with_tools).is_dated for with_tools in (False, True))
        except NeedsEngine:
            return False

    def template(self, with_tools: bool) -> ChatTemplate:
        """Return the template for requests with or without tools, compiled at the first call.

        Some models have one for requests with tools.

        Raises:
            NeedsEngine: the model has none, or one that does not compile here.
        """
        known = self._templates.get(with_tools)
        if known is not None:
            return known
        other = self._templates.get(not with_tools)
        try:
            source = self._find_template(with_tools)
            if other is not None and other.source == source:
                found = other
            else:
                found = ChatTemplate(source, self._memo, self._release, self._content_format)
        except (LookupError, TemplateError) as exc:
            raise NeedsEngine("template", f"{type(exc).__name__}: {exc}") from exc
        self._templates[with_tools] = found
        return found

    def parts(self, request: ChatRequest, memo: JsonMemo, by_the_book: bool) -> Sequence[str]:
        conversation, arguments, template = self._prepare(request, memo)
        continues = bool(arguments.pop("continue_final_message", False))
        if continues and request.shows_media:
            raise NeedsEngine("multimodal", "continue_final_message")
        if continues:
            if arguments.get("add_generation_prompt"):
                raise continued_and_begun()
            conversation, final_text = _tagged(conversation, template)
        if template.is_dated:
            arguments["strftime_now"] = _clock(self.today())
        compiled = template.stock() if by_the_book else template.template
        parts = self._run(compiled, conversation, arguments)
        return [_cut_at_tag("".join(parts), final_text)] if continues else parts

    def wants_system_first(self) -> bool:
        """Return as `Renderer.wants_system_first`; True if any of the templates asks for it."""
        try:
            sources = {self.template(has).source for has in (False, True)}
            return any(map(wants_system_first, sources))
        except NeedsEngine:
            raise
        except Exception as exc:  # whatever a template may raise
            raise NeedsEngine("template", type(exc).__name__) from exc

    def use_format(self, content_format: ContentFormat) -> None:
        """Use the engine's `--chat-template-content-format` instead of detecting it."""
        self._content_format = content_format
        self._templates.clear()

    def _prepare(
        self, request: ChatRequest, memo: JsonMemo
    ) -> tuple[Conversation, dict[str, Any], ChatTemplate]:
        """Convert a request: messages, the arguments for the template, and the template.

        Raises: as `render`.
        """
        if request.engine_only is not None:
            raise NeedsEngine("field", request.engine_only)
        if request.chat_template is not None:  # a client's program may never end
            raise NeedsEngine("request_template")
        if not request.messages:
            raise TemplateFailed("`messages` must hold at least one message", param="messages")
        arguments = template_arguments(request, memo)
        with_tools = arguments.get("tools") is not None
        template = self.template(with_tools)
        conversation = build_conversation(
            request.messages,
            template.content_format,
            memo,
            name_first=request.renders_as == "responses",
            shows_media=request.shows_media,
        )
        if not template.knows_developer:
            conversation = without_developer(conversation)
        accepted = template.accepted
        arguments = {key: value for key, value in arguments.items() if key in accepted}
        if self._adapt is not None:
            arguments = self._adapt(arguments, memo)
        return conversation, arguments, template

    def _run(
        self, template: Template, conversation: Conversation, arguments: dict[str, Any]
    ) -> Sequence[str]:
        given = {
            "tools": None,
            "documents": None,
            **self._special_tokens,
            **arguments,
            "messages": conversation,
        }
        try:
            # `generate` would also resume a generator of its own for each part.
            return list(template.root_render_func(template.new_context(given)))
        except NeedsEngine:
            raise
        except Exception as exc:  # whatever a template may raise; the engine answers 400 to it
            raise TemplateFailed(_reason(exc), param="messages") from exc


def _clock(date: datetime.date) -> Callable[[str], str]:
    """Return the function by which a template asks for the engine's date."""

    def strftime_now(form: str) -> str:
        if not set(_DIRECTIVES.findall(form)) <= _DATES:
            raise NeedsEngine("today", "time of day")
        return date.strftime(form)

    return strftime_now


def _tagged(conversation: Conversation, template: ChatTemplate) -> tuple[Conversation, str]:
    """Mark the end of the last message's text, to cut the rendering there.

    Returns the conversation with the mark, and the text without it.
    """
    if "content" not in template.source:
        raise TemplateFailed("the chat template has no `content` to continue", param="messages")
    last = dict(conversation[-1])
    content = last["content"]
    if isinstance(content, str):
        last["content"] = content + _CONTINUE_TAG
        return [*conversation[:-1], last], content
    if not content:
        raise TemplateFailed("the final message has no text to continue", param="messages")
    text: str = content[-1]["text"]
    last["content"] = [*content[:-1], {**content[-1], "text": text + _CONTINUE_TAG}]
    return [*conversation[:-1], last], text


def _cut_at_tag(text: str, final_text: str) -> str:
    bare_tag = _CONTINUE_TAG.strip()
    if final_text.strip() not in text or bare_tag not in text:
        raise TemplateFailed(
            "the chat template drops the final message, it cannot be continued", param="messages"
        )
    position = text.rindex(bare_tag)
    if text.startswith(_CONTINUE_TAG, position):
        return text[:position]
    return text[:position].rstrip()  # the template trimmed the message


def _reason(exc: BaseException) -> str:
    """Return the template's own message from a chain of errors, else that of `exc`."""
    seen: set[int] = set()
    current: BaseException | None = exc
    while current is not None and id(current) not in seen:
        if isinstance(current, TemplateError):
            return str(current)
        seen.add(id(current))
        current = current.__cause__ or current.__context__
    return str(exc)
