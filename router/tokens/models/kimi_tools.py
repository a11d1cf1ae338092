"""Print tools in TypeScript as Kimi K2.5 and later do: `tools_ts_str` of their templates.

If the engine's code cannot print one schema, it leaves all tools in JSON.
Source: moonshotai's tool_declaration_ts.py (K2.5, K2.6), encode_tools_to_typescript_style.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from router.tokens.needs_engine import NeedsEngine

_Schema = Any  # a JSON value; anything but a schema raises
_Print = Callable[[str], Any]  # a type, given the indentation of its line

_INDENT: Final = "  "
_CONSTRAINTS: Final = {
    "string": ("maxLength", "minLength", "pattern"),
    "number": ("maximum", "minimum"),
    "integer": ("maximum", "minimum"),
    "array": ("maxItems", "minItems"),
}
_IN_UNIONS: Final = {
    "string": "string",
    "number": "number",
    "integer": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "{}",
    "array": "Array<any>",
}
_ENUM_TYPES: Final[dict[str, type | tuple[type, ...]]] = {
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
}


def sort_keys(value: Any) -> Any:
    """Sort the keys of all objects in a JSON value."""
    if isinstance(value, dict):
        return {key: sort_keys(each) for key, each in sorted(value.items())}
    if isinstance(value, list):
        return [sort_keys(each) for each in value]
    return value


def declare_tools(tools: list[dict[str, Any]]) -> str | None:
    """Print function tools; None: the engine's code fails on one.

    Raises:
        NeedsEngine: schemas so deep that the result depends on the engine's stack.
    """
    try:
        functions = "\n".join(
            _function(tool["function"]) for tool in tools if tool.get("type") == "function"
        )
    except RecursionError as exc:
        raise NeedsEngine("tools", "too deep") from exc
    except Exception:  # whatever an invalid schema raises, here and there
        return None
    if not functions:
        return ""
    return f"# Tools\n\n## functions\nnamespace functions {{\n{functions}\n}}\n"


def _function(function: dict[str, Any]) -> str:
    definitions = _Definitions()
    root = _Object(function.get("parameters") or {}, definitions)
    interfaces: list[str] = []
    parameters = root.print("") if not definitions.has_root else "parameters"
    if definitions.has_root:
        interfaces.append(
            "interface parameters " + _braces([each.print(_INDENT) for each in root.properties], "")
        )
    for name, schema in list(definitions.schemas.items()):
        printed = _read(schema, definitions)("")
        about = schema.get("description", "")
        about = _comment(about, "") + "\n" if about else ""
        interfaces.append(f"{about}interface {name} {printed}")
    described = function.get("description")
    head = f"type {function.get('name', 'function')} = (_: {parameters}) => any;"
    return "\n".join(
        filter(None, ["\n".join(interfaces), described and _comment(described, ""), head])
    )


class _Definitions:
    """The schemas that others refer to by name.

    has_root: Whether one refers to the function's parameters as a whole.
    """

    __slots__ = ("has_root", "schemas")

    def __init__(self) -> None:
        self.schemas: dict[str, _Schema] = {}
        self.has_root = False

    def name_of(self, ref: str) -> str:
        if ref == "#":
            self.has_root = True
            return "parameters"
        if not ref.startswith("#/$defs/"):
            raise ValueError(ref)
        name = ref.split("/")[-1]
        is_root: object = self.schemas[name].get("$self_ref", False)
        return "parameters" if is_root else name


class _Property:
    __slots__ = ("_default", "_print", "_schema", "is_optional", "name")

    def __init__(
        self, name: str, schema: _Schema, definitions: _Definitions, *, is_optional: bool
    ) -> None:
        self.name = name
        self.is_optional = is_optional
        self._schema = schema
        self._print = _read(schema, definitions)
        self._default = schema.get("default") if isinstance(schema, dict) else None

    def print(self, indent: str) -> str:
        text = _docstring(self._schema, indent)
        default = self._default
        if default is not None:
            is_number = isinstance(default, int | float)
            shown = repr(default) if is_number else json.dumps(default, ensure_ascii=False)
            text += f"{indent}// Default: {shown}\n"
        return f"{text}{indent}{self.name}{'?' if self.is_optional else ''}: {self._print(indent)}"


class _Object:
    __slots__ = ("_others", "properties")

    def __init__(self, schema: dict[str, Any], definitions: _Definitions) -> None:
        self.properties: list[_Property] = []
        definitions.schemas.update((schema.get("$defs") or {}).items())
        others = schema.get("additionalProperties")
        self._others: Any = _read(others, definitions) if isinstance(others, dict) else others
        if "properties" not in schema:
            return
        properties = schema["properties"]
        optional = set(properties.keys()) - set(schema.get("required", []))
        self.properties = [
            _Property(name, each, definitions, is_optional=name in optional)
            for name, each in properties.items()
        ]

    def print(self, indent: str) -> str:
        inner = indent + _INDENT
        inorder = sorted(self.properties, key=lambda each: (each.is_optional, each.name))
        lines = [each.print(inner) for each in inorder]
        if self._others is not None:
            lines.append(f"{inner}[k: string]: {self._print_others(inner)}")
        return _braces(lines, indent)

    def _print_others(self, indent: str) -> Any:
        if isinstance(self._others, bool):
            return "any" if self._others else "never"
        return self._others(indent)  # raises if it is no schema


def _braces(lines: list[str], indent: str) -> str:
    inner = ",\n".join(lines)
    return f"{{\n{inner}\n{indent}}}" if lines else "{}"


def _read(schema: _Schema, definitions: _Definitions) -> _Print:
    """Return a function that prints a schema; anything but a schema raises."""
    if isinstance(schema, bool):
        return lambda indent: "any" if schema else "null"
    if not isinstance(schema, dict):
        raise TypeError(type(schema).__name__)
    if "$ref" in schema:
        name = definitions.name_of(schema["$ref"])
        return lambda indent: name
    if "anyOf" in schema:
        choices = [_read(each, definitions) for each in schema["anyOf"]]
        return lambda indent: " | ".join([each(indent) for each in choices])
    if "enum" in schema:
        _check_enum(schema)
        return lambda indent: " | ".join(
            f'"{each}"' if isinstance(each, str) else str(each) for each in schema["enum"]
        )
    if not schema:
        return lambda indent: "any"
    kind = schema["type"]
    if isinstance(kind, list):
        union = " | ".join([_IN_UNIONS[each] for each in kind])
        return lambda indent: union
    if kind == "object":
        return _Object(schema, definitions).print
    if kind == "array":
        return _array(schema, definitions)
    return lambda indent: "number" if kind == "integer" else kind


def _array(schema: dict[str, Any], definitions: _Definitions) -> _Print:
    items = schema.get("items") or {}
    item = _read(items, definitions)

    def show(indent: str) -> Any:
        inner = indent + _INDENT
        about = _docstring(items, inner)
        if not about:
            return f"Array<{item(indent)}>"
        return "Array<\n" + about + inner + item(inner) + "\n" + indent + ">"

    return show


def _check_enum(schema: dict[str, Any]) -> None:
    """Raise for values of another type than the schema names, if it names one."""
    if "type" not in schema:
        return
    kind = schema["type"]
    if isinstance(kind, list):
        if len(kind) not in (1, 2) or (len(kind) == 2 and "null" not in kind):
            raise ValueError(kind)
        kind = kind[-1] if kind[0] == "null" else kind[0]
    expected = _ENUM_TYPES.get(kind) if isinstance(kind, str) else None
    for value in schema["enum"]:
        if value is not None and expected is not None and not isinstance(value, expected):
            raise ValueError(kind)


def _docstring(schema: _Schema, indent: str) -> str:
    """Print the comments in front of a type: its description and its limits."""
    if isinstance(schema, bool) or not schema:
        return ""
    about = schema.get("description", "")
    text = _comment(about, indent) + "\n" if about else ""
    is_plain = not ({"$ref", "anyOf", "enum"} & schema.keys())
    kind = schema.get("type")
    limits = _CONSTRAINTS.get(kind, ()) if is_plain and isinstance(kind, str) else ()
    shown = ", ".join(f"{limit}: {schema[limit]}" for limit in limits if limit in schema)
    return f"{text}{indent}// {shown}\n" if shown else text


def _comment(text: str, indent: str) -> str:
    return "\n".join(f"{indent}// {line}" if line else "" for line in text.split("\n"))
