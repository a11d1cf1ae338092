"""Reads the configuration: the file, then variables, then flags; unknown keys are refused."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml
from msgspec import Struct

from router.base.errors import ConfigError, ConfigErrors
from router.config import yaml_file
from router.config.checks import errors_of
from router.config.redis import REDIS_PASSWORD
from router.config.refused import file_name, refused
from router.config.removed import ONLY_MAPPINGS
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
            the message names where it was given, the key and what is allowed. Several are a
            `ConfigErrors`.
    """
    variables = _variables(environ or {})
    tree: dict[str, Any] = read_yaml(file) if file is not None else {}
    try:
        return _load(tree, variables, flags or {})
    except ConfigError as exc:
        errors = exc.errors if isinstance(exc, ConfigErrors) else (exc,)
        raise _one([_placed(each, file, variables, flags or {}) for each in errors]) from exc


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
    replicas = tree.get("replicas")
    if isinstance(replicas, list):  # `--replica URL`, or a bare URL in the file
        tree["replicas"] = [{"url": each} if isinstance(each, str) else each for each in replicas]
    wrong = [*_refuse_texts(tree), *_join_masters(tree.get("mooncake"))]
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


def _refuse_texts(tree: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Yield entries that are text where each must be a mapping, and what to write instead."""
    for path, instead in ONLY_MAPPINGS.items():
        section, key = path.split(".")
        node = tree.get(section)
        entries = node.get(key) if isinstance(node, dict) else None
        for i, entry in enumerate(entries if isinstance(entries, list) else ()):
            if isinstance(entry, str):
                where = f"{path}[{i}]"
                yield ConfigError(f"{where}: {entry!r} must be a mapping; {instead}", param=where)


def _join_masters(section: Any) -> Iterator[ConfigError]:
    """Join the masters of each pool where they are a list; yield what is wrong with them."""
    if isinstance(section, list):
        yield ConfigError(
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
                yield ConfigError(f"{key}: each master is a URL", param=key)
                continue
            masters = node["master"] = ",".join(masters) or None
        if isinstance(masters, str) and _NAMED.match(masters):
            instead = ONLY_MAPPINGS["mooncake.pools"]
            yield ConfigError(f"{key}: {masters!r} has a name; {instead}", param=key)


def _known(section: type[Struct]) -> str:
    return ", ".join(field.name for field in msgspec.structs.fields(section))
