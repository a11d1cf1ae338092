"""Read from its source how a Kimi model's tokenizer works; the source is never executed.

Kimi's models have no tokenizer.json. They have `tiktoken.model` and a class of their own, which an
engine runs with `--trust-remote-code`. Releases of the class differ in a few facts, which are read
from the syntax tree. A class with anything unknown is left to the engine.
Source: moonshotai's tokenization_kimi.py (K2, K2 Thinking, K2.5, K2.6), TikTokenTokenizer.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any, Final

from msgspec import Struct

from router.tokens.models.modes import KIMI_CLASS
from router.tokens.needs_engine import NeedsEngine

_METHODS: Final = frozenset(
    "__init__ encode encode_batch decode _split_whitespaces_or_nonwhitespaces "
    "pre_tokenizer_process vocab_size get_vocab _tokenize _convert_token_to_id "
    "_convert_id_to_token clean_up_tokenization convert_tokens_to_string save_vocabulary "
    "apply_chat_template".split()
)
_ENCODES: Final = {400_000, 25_000, "all"}
_PREPARES: Final = frozenset(
    "deep_sort_dict encode_tools_to_typescript_style apply_chat_template super print".split()
)
_NO_DEFAULTS: Final = frozenset({"tools", "tokenize", "add_generation_prompt"})


class KimiCode(Struct, frozen=True, kw_only=True):
    """The facts about a class that decide a chat's tokens.

    pattern: Splits a text.
    num_special: Number of ids behind those of the vocabulary file.
    special_defaults: Special tokens of models whose configuration names none.
    keeps_added: Whether texts are split at all of the configuration's added tokens; False: at the
        special ones alone.
    sorts_tools: Whether the template gets tools with their keys in order.
    declares_tools: Whether the template also gets tools in TypeScript, as `tools_ts_str`.
    template_defaults: Arguments of the template that a request may override.
    """

    pattern: str
    num_special: int
    special_defaults: tuple[str, ...] = ()
    keeps_added: bool = False
    sorts_tools: bool = False
    declares_tools: bool = False
    template_defaults: dict[str, Any] = {}


def read_code(source: str) -> KimiCode:
    """Read the facts in a module's source.

    Raises:
        NeedsEngine: it contains something that is not known here.
    """
    try:
        found = [
            node
            for node in ast.parse(source).body
            if isinstance(node, ast.ClassDef) and node.name == KIMI_CLASS
        ]
        if len(found) != 1:
            raise _unknown(f"no class {KIMI_CLASS}")
        return _read_class(found[0])
    except (SyntaxError, ValueError, RecursionError, MemoryError) as exc:
        raise _unknown(type(exc).__name__) from exc


def _read_class(node: ast.ClassDef) -> KimiCode:
    methods = {each.name: each for each in node.body if isinstance(each, ast.FunctionDef)}
    values = dict(_assigned(node.body))
    strange = methods.keys() - _METHODS
    if strange:
        raise _unknown(min(strange))
    for name in ("__init__", "encode", "_tokenize"):
        if name not in methods:
            raise _unknown(f"no {name}")
    constants = {
        each.value for each in ast.walk(methods["encode"]) if isinstance(each, ast.Constant)
    }
    if not constants >= _ENCODES:
        raise _unknown("encode")
    before = methods.get("pre_tokenizer_process")
    if before is not None and not ast.unparse(before.body[-1]) == "return [text]":
        raise _unknown("pre_tokenizer_process")
    own = dict(_assigned(ast.walk(methods["__init__"])))
    template = methods.get("apply_chat_template")
    called = set(_called(template)) if template is not None else set()
    if not called <= _PREPARES:
        raise _unknown("apply_chat_template")
    return KimiCode(
        pattern=_pattern(values.get("pat_str")),
        num_special=_num_special(methods["__init__"], values.get("num_reserved_special_tokens")),
        special_defaults=_names(own.get("additional_special_tokens")),
        keeps_added=any(
            keyword.arg == "added_tokens_decoder"
            for call in ast.walk(methods["__init__"])
            if isinstance(call, ast.Call)
            for keyword in call.keywords
        ),
        sorts_tools="deep_sort_dict" in called,
        declares_tools="encode_tools_to_typescript_style" in called,
        template_defaults=_defaults(template) if template is not None else {},
    )


def _assigned(nodes: Any) -> Iterator[tuple[str, ast.expr]]:
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name):
                yield target.id, node.value


def _called(node: ast.AST) -> Iterator[str]:
    for call in ast.walk(node):
        if isinstance(call, ast.Call):
            function = call.func
            yield (
                function.id
                if isinstance(function, ast.Name)
                else (function.attr if isinstance(function, ast.Attribute) else "?")
            )


def _pattern(node: ast.expr | None) -> str:
    """Evaluate a text, or texts that are joined with `"|".join([…])`."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str(between)), attr="join"),
            args=[ast.List(elts=parts)],
        ) if all(isinstance(part, ast.Constant) for part in parts):
            return between.join(ast.literal_eval(part) for part in parts)
    raise _unknown("pat_str")


def _num_special(init: ast.FunctionDef, reserved: ast.expr | None) -> int:
    """Evaluate the length of `range(num_base_tokens, num_base_tokens + …)`."""
    for call in ast.walk(init):
        match call:
            case ast.Call(func=ast.Name(id="range"), args=[ast.Name(id=start), end]):
                terms = sorted(_terms(end), key=str)
                numbers = [term for term in terms if isinstance(term, int)]
                if [term for term in terms if isinstance(term, str)] == [
                    start,
                    "self.num_reserved_special_tokens",
                ]:
                    match reserved:
                        case ast.Constant(value=int(number)):
                            return number + sum(numbers)
    raise _unknown("special tokens")


def _terms(node: ast.expr) -> Iterator[int | str]:
    match node:
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            yield from _terms(left)
            yield from _terms(right)
        case ast.Constant(value=int(number)):
            yield number
        case _:
            yield ast.unparse(node)


def _names(node: ast.expr | None) -> tuple[str, ...]:
    found = ast.literal_eval(node) if node is not None else []
    if not all(isinstance(each, str) for each in found):
        raise _unknown("additional_special_tokens")
    return tuple(found)


def _defaults(node: ast.FunctionDef) -> dict[str, Any]:
    names = [each.arg for each in node.args.args][-len(node.args.defaults) :]
    names += [each.arg for each in node.args.kwonlyargs]
    values = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
    return {
        name: ast.literal_eval(value)
        for name, value in zip(names, values, strict=True)
        if name not in _NO_DEFAULTS
    }


def _unknown(what: str) -> NeedsEngine:
    return NeedsEngine("model", f"code of the tokenizer: {what}")
