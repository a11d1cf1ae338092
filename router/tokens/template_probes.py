"""Find out what a chat template accepts, as the engine does: by its syntax tree, and by trying it.

    format    Does a message's content come as a string or as a list of parts? If anything loops
              over it, the template gets parts ("openai"), else their joined text ("string").
              From 0.33 on, a namespace's attributes count as names of messages (`ns.rest`), and
              other targets are skipped.
    system    Does the template accept a system message behind a user's? Else all of them are joined
              in front, and each new reminder changes the prompt from its beginning on.
    effort    Does the effort `none` change the prompt? Else disabled thinking is `low`.

The last two are tried for requests of `/v1/messages`, in a bare environment. A template that calls
a function of transformers fails there, and counts as one that wants its system message first.

Sources: vllm/renderers/hf.py, _iter_nodes_assign_content_item, 0.32.0 and 0.33.0; vLLM 0.32.0,
entrypoints/anthropic/serving.py (_should_merge_inline_system, _detect_merge_inline_system,
_probe_disabled_thinking_effort).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from router.api.openai import ChatRequest, Json
from router.base.engines import V0_32, V0_33, Release
from router.base.errors import TemplateFailed
from router.tokens.needs_engine import NeedsEngine

ContentFormat = Literal["string", "openai"]


def detect_content_format(tree: nodes.Template, release: Release = V0_32) -> ContentFormat:
    """Detect the format by the template's tree; "string" if the rule cannot be applied."""
    try:
        return "openai" if any(_content_loops(tree, release)) else "string"
    except _NotAName:
        return "string"


_MAX_ALIASES = 10_000  # two names that are set to each other would loop for ever


class _NotAName(Exception):
    """The rule stops at a target such as `{% for a, b in messages %}`."""


def _content_loops(tree: nodes.Template, release: Release) -> Iterator[bool]:
    aliases = _aliases if release < V0_33 else _aliases_since_0_33
    messages = list(_loop_targets(tree, aliases(tree, "messages")))
    content_params: dict[int, set[str]] = {}
    in_macros: set[int] = set()
    for macro in tree.find_all(nodes.Macro):
        params = _content_params(tree, macro, messages)
        for loop in macro.find_all(nodes.For):
            in_macros.add(id(loop))
            if params:
                content_params[id(loop)] = params
    for loop in tree.find_all(nodes.For):
        if any(_reads(loop.iter, name, "content") for name in messages):
            yield bool(_name(loop.target))
        elif isinstance(loop.iter, nodes.Name) and (
            loop.iter.name in content_params.get(id(loop), ())
            or (id(loop) not in in_macros and loop.iter.name == "content")
        ):
            yield bool(_name(loop.target))


def _aliases(tree: nodes.Template, name: str) -> list[str]:
    """List the names that `{% set %}` gives to `name` or to a part of it, `name` first."""
    found, queue = [name], [name]
    while queue:
        related = queue.pop(0)
        for assign in tree.find_all(nodes.Assign):
            if _reads(assign.node, related):
                target = _name(assign.target)
                found.append(target)
                if target != related:
                    queue.append(target)
        if len(found) > _MAX_ALIASES:
            raise _NotAName
    return found


def _aliases_since_0_33(tree: nodes.Template, name: str) -> list[str]:
    """List the names as `_aliases` does, and attributes of namespaces as `ns.rest`."""
    found = [name]
    for related in found:  # grows meanwhile
        for assign in tree.find_all(nodes.Assign):
            for alias in _assigned(assign, related):
                if alias not in found:
                    found.append(alias)
    return found


def _assigned(assign: nodes.Assign, related: str) -> Iterator[str]:
    """List the names that an assignment gives to `related` or to a part of it."""
    target, value = assign.target, assign.node
    if isinstance(target, nodes.Name):
        if _reads(value, related):
            yield target.name
        called = value.node if isinstance(value, nodes.Call) else None
        if isinstance(called, nodes.Name) and called.name == "namespace":
            for keyword in value.kwargs:  # type: ignore[attr-defined]
                if _reads(keyword.value, related):
                    yield f"{target.name}.{keyword.key}"
    elif isinstance(target, nodes.NSRef) and _reads(value, related):
        yield f"{target.name}.{target.attr}"


def _loop_targets(tree: nodes.Template, iterables: list[str]) -> Iterator[str]:
    for loop in tree.find_all(nodes.For):
        if any(_reads(loop.iter, name) for name in iterables):
            yield _name(loop.target)


def _content_params(tree: nodes.Template, macro: nodes.Macro, messages: list[str]) -> set[str]:
    """Find the parameters of `macro` that some call fills with a message's content."""
    names = {arg.name for arg in macro.args}
    found: set[str] = set()
    for call in tree.find_all(nodes.Call):
        if not (isinstance(call.node, nodes.Name) and call.node.name == macro.name):
            continue
        for param, arg in zip(macro.args, call.args, strict=False):
            if any(_reads(arg, name, "content") for name in messages):
                found.add(param.name)
        for keyword in call.kwargs:
            if keyword.key in names and any(
                _reads(keyword.value, name, "content") for name in messages
            ):
                found.add(keyword.key)
    return found


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Return whether a node is `name` (or `name[key]`), perhaps filtered, tested or sliced."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is None:
        if isinstance(node, nodes.Getattr):
            space, _, attribute = name.rpartition(".")
            return bool(space) and node.attr == attribute and _reads_name(node, space)
        return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
    if isinstance(node, nodes.Getitem):
        return (
            isinstance(node.arg, nodes.Const) and node.arg.value == key and _reads_name(node, name)
        )
    return isinstance(node, nodes.Getattr) and node.attr == key and _reads_name(node, name)


def _reads_name(node: nodes.Getitem | nodes.Getattr, name: str) -> bool:
    inner = node.node
    return isinstance(inner, nodes.Name) and inner.ctx == "load" and inner.name == name


def _name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise _NotAName
    return target.name


_CONVERSATION: Final = [{"role": role, "content": "t"} for role in ("system", "user") * 2]
_EFFORTS: Final = ("low", "medium", "high", "xhigh", "max")
_HI: Final = ({"role": "user", "content": "Hi"},)


def wants_system_first(source: str) -> bool:
    """Return whether a template refuses a system message behind a user's.

    Raises: whatever else a template may raise; an engine does not start with such a template.
    """
    if not source:
        return True
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    try:
        environment.from_string(source).render(messages=_CONVERSATION, add_generation_prompt=False)
    except jinja2.TemplateError:
        return True
    return False


def disabled_effort(
    render: Callable[[ChatRequest], object], efforts: Mapping[str, str], defaults: Json | None
) -> str:
    """Return the effort for disabled thinking: `low` if `none` changes nothing.

    Args:
        render: Renders a chat with the template.
        efforts, defaults: See `Renderer`.

    Raises:
        NeedsEngine: the template cannot be tried out here.
    """

    def prompt(effort: str) -> object:
        try:
            return render(
                ChatRequest(
                    model=None,
                    messages=_HI,
                    reasoning_effort=efforts.get(effort, effort),
                    template_defaults=defaults,
                )
            )
        except TemplateFailed:
            return None
        except NeedsEngine as exc:
            if exc.reason != "rules":
                raise
            return None

    without = prompt("none")
    if without is None or any(prompt(effort) == without for effort in _EFFORTS):
        return "low"
    return "none"


def with_system_first(messages: Sequence[Json]) -> list[Json]:
    """Join all system messages in front; their contents are strings."""
    texts: list[Any] = [each["content"] for each in messages if each["role"] == "system"]
    others = [each for each in messages if each["role"] != "system"]
    return [{"role": "system", "content": "".join(texts)}, *others]
