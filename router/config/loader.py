"""Reads the configuration: the file, variables, `--set`, flags; unknown keys are refused.

The JSON Schema of the file, for editors and CI, has what the types say, and the shorter forms that
the loader accepts: a URL for a replica. What types cannot say (router.config.checks) only the
loader refuses.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import yaml
from msgspec import Struct

from policies.registry import POLICIES
from router.base.errors import ConfigError, ConfigErrors
from router.config import yaml_file
from router.config.checks import errors_of
from router.config.redis import REDIS_PASSWORD
from router.config.refused import file_name, refused
from router.config.tree import SECTIONS, Config, Option, options

SWITCHES: Final = (("tokens", "hand_over"), ("queue", "mode"))
"""What is on or off, which YAML reads as true or false where it is not in quotes."""

_PREFIX: Final = "WARMROUTE_"
_OTHERS: Final = re.compile(
    rf"{_PREFIX}(CONFIG|ADMIN_URL|ADMIN_TOKEN|REDIS_PASSWORD|KEY|VLLM_PYTHON|KIMI_CODE|FUZZ_SECONDS|TEST_\w*)"
)
"""Variables that other programs, tests and clients read."""
_SERVICE: Final = re.compile(
    rf"{_PREFIX}(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)"
)
_SERVICE_PORT: Final = re.compile(rf"{_PREFIX}(\w+_)?PORT")
_LINK: Final = re.compile(r"(tcp|udp|sctp)://")

_PART: Final = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],]')  # a JSON string, or what has a meaning
_OPTIONS: Final = {option.path: option for option in options()}


class _Given(NamedTuple):
    """A value that is not in the file."""

    where: str  # "WARMROUTE_LISTEN_PORT", "--port", "--set"
    value: Any


_Values = dict[tuple[str, ...], _Given]


def load(
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[tuple[str, ...], Any] | None = None,
    settings: Sequence[str] = (),
) -> Config:
    """Read the configuration.

    Args:
        settings: What `--set` got, KEY=VALUE each.

    Raises:
        ConfigError: unreadable file, unknown key or variable, value of the wrong type or range;
            the message names where it was given, the key and what is allowed. Several are a
            `ConfigErrors`.
    """
    given = _variables(environ or {}) | _settings(settings)
    given |= {path: _Given(_OPTIONS[path].argument, value) for path, value in (flags or {}).items()}
    tree: dict[str, Any] = read_yaml(file) if file is not None else {}
    try:
        return _load(tree, given)
    except ConfigError as exc:
        errors = exc.errors if isinstance(exc, ConfigErrors) else (exc,)
        raise _one([_placed(each, file, given) for each in errors]) from exc


def _load(tree: dict[str, Any], given: _Values) -> Config:
    for path, (_, value) in given.items():
        option = _OPTIONS.get(path)
        _put(tree, path, value if option is None else _read(option, value))
    for section, key in SWITCHES:
        node = tree.get(section)
        if isinstance(node, dict) and isinstance(node.get(key), bool):
            node[key] = "on" if node[key] else "off"
    replicas = tree.get("replicas")
    if isinstance(replicas, list):  # `--replica URL`, or a bare URL in the file
        tree["replicas"] = [{"url": each} if isinstance(each, str) else each for each in replicas]
    _join_masters(tree.get("mooncake"))
    wrong: list[ConfigError] = []
    redis = tree.get("redis")
    if isinstance(redis, dict) and redis.pop("password", None) is not None:
        wrong.append(
            ConfigError(
                f"redis.password: not allowed in the file; set {REDIS_PASSWORD}, or name a file "
                "in redis.password_file",
                param="redis.password",
            )
        )
    try:
        wrong += refused(tree, Config)
        # A wrong section is left out, so that what is wrong with the others is found, too.
        left_out = {re.split(r"[.\[]", each.param or "")[0] for each in wrong}
        known = set(Config.__struct_fields__) - left_out
        kept = {name: node for name, node in tree.items() if name in known}
        config = msgspec.convert(kept, Config, strict=False, dec_hook=file_name)
    except UnicodeEncodeError as exc:  # as Python reads odd bytes of the environment, and of flags
        raise ConfigError(f"{exc.object!r}: a value must be UTF-8") from exc
    wrong += errors_of(config, left_out)
    if wrong:
        raise _one(wrong)
    return config


def _one(errors: Sequence[ConfigError]) -> ConfigError:
    """Make one error of several; of those of one key the first stays."""
    firsts = {each.param or each.message: each for each in reversed(errors)}
    kept = [each for each in errors if firsts[each.param or each.message] is each]
    return kept[0] if len(kept) == 1 else ConfigErrors(kept)


def _placed(error: ConfigError, file: Path | None, given: _Values) -> ConfigError:
    """Name where a wrong value was given: its flag or variable, or file and line."""
    key = error.param or ""
    for path, each in given.items():
        name = ".".join(path)
        if key == name or key.startswith((f"{name}.", f"{name}[")):
            return ConfigError(f"{each.where}: {error.message}", param=key)
    if file is None or not key:
        return error
    try:
        data = yaml_file.read(file)
    except ConfigError:
        return error
    is_there = yaml_file.line_of(data, key) is not None
    return yaml_file.placed(error, file, data) if is_there else error


def _variables(environ: Mapping[str, str]) -> _Values:
    """Return the variables that are settings.

    Kubernetes sets others in every pod, for a Service whose name begins with `warmroute`:
    `WARMROUTE_SERVICE_HOST`, `WARMROUTE_ADMIN_PORT=tcp://10.0.0.1:8081` and more.

    Raises:
        ConfigError: one is neither a setting nor anything else that is known.
    """
    found: _Values = {}
    known = {option.variable: option for option in options()}
    for name, text in environ.items():
        if not name.startswith(_PREFIX) or _OTHERS.fullmatch(name):
            continue
        if _SERVICE.fullmatch(name) or (_SERVICE_PORT.fullmatch(name) and _LINK.match(text)):
            continue
        if name not in known:
            by_flag = {
                _PREFIX + o.flag.replace("-", "_").upper(): o.variable for o in options() if o.flag
            }
            near = difflib.get_close_matches(name, [*known, *by_flag], n=1)
            meant = f"did you mean {by_flag.get(near[0], near[0])}? " if near else ""
            raise ConfigError(
                f"unknown variable {name}: {meant}`warmroute options` lists all", param=name
            )
        found[known[name].path] = _Given(name, text)
    return found


def _settings(settings: Sequence[str]) -> _Values:
    """Split KEY=VALUE; a key that is unknown becomes part of the tree, and is refused there."""
    found: _Values = {}
    for text in settings:
        key, equals, value = text.partition("=")
        if not equals or not all(key.split(".")):
            raise ConfigError(f"--set {text}: write --set KEY=VALUE", param="--set")
        found[tuple(key.split("."))] = _Given("--set", value)
    return found


def read_yaml(file: Path, known: type[Struct] = Config) -> dict[str, Any]:
    """Read a file whose top level is a mapping.

    Raises:
        ConfigError: it cannot be read, or is none such.
    """
    try:
        tree = yaml_file.parse(yaml_file.read(file))
    except ConfigError as exc:
        raise ConfigError(f"{file}: {exc.message}") from exc
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: the top level must be a mapping of {_known(known)}")
    return tree


def _pairs(option: Option, parts: Sequence[str]) -> dict[str, Any]:
    """Split NAME=VALUE pairs; numbers become numbers."""
    result: dict[str, Any] = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals or not name:
            raise ConfigError(f"{option.key}: {part!r} is not NAME=VALUE", param=option.key)
        try:
            result[name] = yaml.safe_load(value) if value else ""
        except yaml.YAMLError:
            result[name] = value
    return result


def _put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        node = tree.setdefault(key, {})
        if not isinstance(node, dict):
            raise ConfigError(f"{key}: must be a mapping", param=key)
        tree = node
    tree[path[-1]] = value


def _read(option: Option, value: Any) -> Any:
    """Read a text: lists are comma-separated, mappings NAME=VALUE pairs.

    A VALUE in braces keeps its commas.
    """
    if option.kind is None and isinstance(value, str):
        value = [part.strip() for part in _split_at_commas(value) if part.strip()]
    return _pairs(option, value) if option.mapping and isinstance(value, list) else value


def _split_at_commas(text: str) -> list[str]:
    """Split at the commas that are in no braces of JSON."""
    parts, start, depth = [], 0, 0
    for found in _PART.finditer(text):
        sign = found[0]
        depth += (sign in "{[") - (sign in "}]")
        if sign == "," and depth <= 0:
            parts.append(text[start : found.start()])
            start = found.end()
    return [*parts, text[start:]]


def _join_masters(section: Any) -> None:
    """Join the masters of each pool where they are a list."""
    pools = section.get("pools") if isinstance(section, dict) else None
    for node in (section, *(pools if isinstance(pools, list) else ())):
        masters = node.get("master") if isinstance(node, dict) else None
        if isinstance(masters, list):
            node["master"] = ",".join(map(str, masters)) or None


def _known(section: type[Struct]) -> str:
    return ", ".join(field.name for field in msgspec.structs.fields(section))


_TEXT: Final = {"type": "string"}


def json_schema() -> dict[str, Any]:
    """Return the schema of a whole file."""
    schema = msgspec.json.schema(Config, schema_hook=lambda _: dict(_TEXT))
    parts = schema["$defs"]
    config = parts["Config"]
    config |= {"title": "warmroute configuration", "description": "A file for `warmroute serve`."}
    for name, heading in SECTIONS.items():
        config["properties"][name]["title"] = heading
        config["properties"][name].pop("default")  # of a section: its keys have their own

    def field(section: str, key: str) -> dict[str, Any]:
        part = config["properties"][section]["$ref"].rpartition("/")[2]
        found: dict[str, Any] = parts[part]["properties"][key]
        return found

    for section, key in SWITCHES:
        _also(field(section, key), {"type": "boolean"})
    replicas = config["properties"]["replicas"]
    replicas["items"] = {"anyOf": [dict(_TEXT), replicas["items"]]}
    for master in (field("mooncake", "master"), parts["PoolConfig"]["properties"]["master"]):
        _also(master, {"type": "array", "items": dict(_TEXT)})
    _also(field("policy", "name"), {"enum": sorted(POLICIES)})
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _also(field: dict[str, Any], form: dict[str, Any]) -> None:
    """Allow another form of a value."""
    kept = ("description", "default", "title")
    main = {key: field.pop(key) for key in list(field) if key not in kept}
    field["anyOf"] = [form, *main.get("anyOf", [main])]
