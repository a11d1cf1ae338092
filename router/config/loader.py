"""Reads the configuration: the file, then variables, then flags; unknown keys are refused."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints

import msgspec
import yaml
from msgspec import Struct

from policies.naming import split
from router.base.errors import ConfigError
from router.config import yaml_file
from router.config.checks import check
from router.config.experiments import Experiment
from router.config.redis import REDIS_PASSWORD
from router.config.removed import ONLY_MAPPINGS, REMOVED
from router.config.tree import Config, Option, options

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
_NAMED: Final = re.compile(r"\s*[A-Za-z0-9._-]{1,64}=")


def load(
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[tuple[str, ...], Any] | None = None,
) -> Config:
    """Read the configuration.

    Raises:
        ConfigError: unreadable file, unknown key or variable, value of the wrong type or range;
            the message names where it was given, the key and what is allowed.
    """
    variables = _variables(environ or {})
    tree: dict[str, Any] = read_yaml(file) if file is not None else {}
    try:
        return _load(tree, variables, flags or {})
    except ConfigError as exc:
        raise _placed(exc, file, variables, flags or {}) from exc


def _load(
    tree: dict[str, Any], variables: Mapping[str, str], flags: Mapping[tuple[str, ...], Any]
) -> Config:
    for option in options():
        text = variables.get(option.variable)
        if text is not None:
            _put(tree, option.path, _from_text(option, text))
        value = flags.get(option.path)
        if value is not None:
            _put(tree, option.path, value)
    for section, key in SWITCHES:
        node = tree.get(section)
        if isinstance(node, dict) and isinstance(node.get(key), bool):
            node[key] = "on" if node[key] else "off"
    redis = tree.get("redis")
    if isinstance(redis, dict) and "password" in redis:
        raise ConfigError(
            f"redis.password: not allowed in the file; set {REDIS_PASSWORD}, or name a file in "
            "redis.password_file",
            param="redis.password",
        )
    replicas = tree.get("replicas")
    if isinstance(replicas, list):  # `--replica URL`, or a bare URL in the file
        tree["replicas"] = [{"url": each} if isinstance(each, str) else each for each in replicas]
    _refuse_texts(tree)
    _join_masters(tree.get("mooncake"))
    _expand_shadows(tree.get("shadow"))
    try:
        config = msgspec.convert(tree, Config, strict=False, dec_hook=_path)
    except msgspec.ValidationError as exc:
        raise explained(str(exc)) from exc
    except UnicodeEncodeError as exc:  # as Python reads odd bytes of the environment, and of flags
        raise ConfigError(f"{exc.object!r}: a value must be UTF-8") from exc
    check(config)
    return config


def _placed(
    error: ConfigError,
    file: Path | None,
    variables: Mapping[str, str],
    flags: Mapping[tuple[str, ...], Any],
) -> ConfigError:
    """Name where a wrong value was given: its flag or variable, or file and line."""
    key = error.param or ""
    for option in options():
        path = ".".join(option.path)
        if key == path or key.startswith((f"{path}.", f"{path}[")):
            if flags.get(option.path) is not None:
                return ConfigError(f"--{option.flag}: {error.message}", param=key)
            if option.variable in variables:
                return ConfigError(f"{option.variable}: {error.message}", param=key)
    if file is None or not key:
        return error
    try:
        data = yaml_file.read(file)
    except ConfigError:
        return error
    is_there = yaml_file.line_of(data, key) is not None
    return yaml_file.placed(error, file, data) if is_there else error


def _variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are settings.

    Kubernetes sets others in every pod, for a Service whose name begins with `warmroute`:
    `WARMROUTE_SERVICE_HOST`, `WARMROUTE_ADMIN_PORT=tcp://10.0.0.1:8081` and more.

    Raises:
        ConfigError: one is neither a setting nor anything else that is known.
    """
    found: dict[str, str] = {}
    known = {option.variable: option for option in options()}
    for name, text in environ.items():
        if not name.startswith(_PREFIX) or _OTHERS.fullmatch(name):
            continue
        if _SERVICE.fullmatch(name) or (_SERVICE_PORT.fullmatch(name) and _LINK.match(text)):
            continue
        if name not in known:
            by_flag = {_PREFIX + o.flag.replace("-", "_").upper(): o.variable for o in options()}
            near = difflib.get_close_matches(name, [*known, *by_flag], n=1)
            meant = f"did you mean {by_flag.get(near[0], near[0])}? " if near else ""
            raise ConfigError(
                f"unknown variable {name}: {meant}`warmroute options` lists all", param=name
            )
        found[name] = text
    return found


def experiment_of(tree: Mapping[str, Any]) -> Experiment:
    """Read one experiment's definition, as it is in a file; its sense is not checked.

    Raises:
        ConfigError: unknown key, value of the wrong type or range; the message names the key.
    """
    try:
        return msgspec.convert(tree, Experiment, strict=False)
    except msgspec.ValidationError as exc:
        raise explained(str(exc), Experiment) from exc


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


def explained(message: str, root: type[Struct] = Config) -> ConfigError:
    """Turn msgspec's message into one that names the key and what is allowed there."""
    text, _, where = message.partition(" - at `$")
    path = where.rstrip("`").lstrip(".").replace("[...]", "[]")
    unknown = re.search(r"unknown field `([^`]*)`", text)
    choices: list[str] = []
    section: Any = root
    for step in re.findall(r"[a-z_]+", path):
        hint = get_type_hints(section)[step]
        section = next((a for a in get_args(hint) if isinstance(a, type)), hint)
        choices = [c for a in (hint, *get_args(hint)) for c in get_args(a) if isinstance(c, str)]
    if unknown is None:
        if text.startswith("Invalid enum value") and choices:
            text += f". Allowed: {', '.join(choices)}"
        return ConfigError(f"{path or 'configuration'}: {text}", param=path or None)
    key = f"{path}.{unknown[1]}" if path else unknown[1]
    removed = REMOVED.get(re.sub(r"\[\d+\]", "[]", key))
    if removed is not None:
        return ConfigError(f"{key} was removed: {removed}", param=key)
    allowed = [field.name for field in msgspec.structs.fields(section)]
    near = difflib.get_close_matches(unknown[1], allowed, n=1)
    hint_text = f"did you mean {near[0]!r}? " if near else ""
    return ConfigError(f"unknown key {key!r}: {hint_text}Allowed: {', '.join(allowed)}", param=key)


def pairs(option: Option, parts: list[str]) -> dict[str, Any]:
    """Split NAME=VALUE pairs; numbers become numbers."""
    result: dict[str, Any] = {}
    for part in parts:
        name, equals, value = part.partition("=")
        if not equals or not name:
            raise ConfigError(f"--{option.flag}: {part!r} is not NAME=VALUE", param=option.flag)
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


def _from_text(option: Option, text: str) -> Any:
    """Read an environment variable: lists are comma-separated, mappings NAME=VALUE pairs.

    A VALUE in braces keeps its commas.
    """
    if option.kind is not None:
        return text
    parts = [part.strip() for part in _split_at_commas(text) if part.strip()]
    return pairs(option, parts) if option.mapping else parts


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


def _refuse_texts(tree: Mapping[str, Any]) -> None:
    """Refuse entries that are text where each must be a mapping.

    Raises:
        ConfigError: one is; the message says what to write instead.
    """
    for path, instead in ONLY_MAPPINGS.items():
        section, key = path.split(".")
        node = tree.get(section)
        entries = node.get(key) if isinstance(node, dict) else None
        for i, entry in enumerate(entries if isinstance(entries, list) else ()):
            if isinstance(entry, str):
                where = f"{path}[{i}]"
                raise ConfigError(f"{where}: {entry!r} must be a mapping; {instead}", param=where)


def _join_masters(section: Any) -> None:
    """Join the masters of each pool where they are a list.

    Raises:
        ConfigError: a master is no text, or has a name.
    """
    if isinstance(section, list):
        raise ConfigError(
            "mooncake: must be a mapping; list several masters of one pool in mooncake.master, and "
            "several pools in mooncake.pools",
            param="mooncake",
        )
    if not isinstance(section, dict):
        return
    pools = section.get("pools")
    nodes = {"mooncake.master": section}
    for i, pool in enumerate(pools if isinstance(pools, list) else ()):
        nodes[f"mooncake.pools[{i}].master"] = pool
    for key, node in nodes.items():
        masters = node.get("master") if isinstance(node, dict) else None
        if isinstance(masters, list):
            if not all(isinstance(url, str) for url in masters):
                raise ConfigError(f"{key}: each master is a URL", param=key)
            masters = node["master"] = ",".join(masters) or None
        if isinstance(masters, str) and _NAMED.match(masters):
            instead = ONLY_MAPPINGS["mooncake.pools"]
            raise ConfigError(f"{key}: {masters!r} has a name; {instead}", param=key)


def _expand_shadows(section: Any) -> None:
    """Replace policies that are text by the mappings they stand for."""
    policies = section.get("policies") if isinstance(section, dict) else None
    if not isinstance(policies, list):
        return
    section["policies"] = expanded = [*policies]
    for i, text in enumerate(policies):
        if isinstance(text, str):
            try:
                name, params = split(text)
            except ValueError as exc:
                key = f"shadow.policies[{i}]"
                raise ConfigError(f"{key}: {exc}", param=key) from exc
            expanded[i] = {"name": name, "params": params}


def _path(kind: type, value: Any) -> Any:
    """Decode what msgspec does not know: file names. What is wrong it reports with its place."""
    if kind is Path and isinstance(value, str | Path) and str(value):
        return Path(value)
    raise ValueError("Expected a file name")


def _known(section: type[Struct]) -> str:
    return ", ".join(field.name for field in msgspec.structs.fields(section))
