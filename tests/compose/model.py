"""Read compose files as `docker compose` does: `.env`, variables, anchors, `extends`.

What must live here: the files' own rules, as far as our files use them; a key or a form that is not
understood is refused, never passed over. What must not: processes (tests.compose.runner).
Source: the Compose Specification, and compose-go's override package for what `extends` merges.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from msgspec import Struct

_VARIABLE = re.compile(
    r"\$(?:(?P<escaped>\$)|(?P<plain>[A-Za-z_]\w*)"
    r"|\{(?P<name>[A-Za-z_]\w*)(?:(?P<operator>:?[-?+])(?P<word>[^{}]*))?\}|(?P<bad>))"
)
_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}

# `extends`: these are replaced whole by what the extending service says, other lists are appended.
_REPLACED = frozenset({"command", "entrypoint", "test"})


class ComposeError(ValueError):
    """A file that Compose would refuse, or that uses what is not understood here."""


class Mount(Struct, frozen=True, kw_only=True):
    """What is at `target` in the container: a file or directory of ours, a volume, or memory."""

    target: str
    source: Path | None = None  # None: no file of ours
    content: str | None = None  # of a file that is written in the compose file itself
    volume: str | None = None  # named volume; None with no source: tmpfs


class HealthCheck(Struct, frozen=True, kw_only=True):
    """How a service says that it is well; times in seconds."""

    test: tuple[str, ...]
    interval_s: float = 30.0
    timeout_s: float = 30.0
    retries: int = 3
    start_period_s: float = 0.0


class Published(Struct, frozen=True, kw_only=True):
    """A port of the container that the host has, too."""

    host: str
    port: int
    target: int


class Service(Struct, frozen=True, kw_only=True):
    """One service, everything resolved. `raw` is the whole of it, for what is only looked at."""

    name: str
    image: str
    entrypoint: tuple[str, ...] | None  # None: the image's
    command: tuple[str, ...] | None  # None: the image's
    environment: dict[str, str]
    depends_on: dict[str, str]  # service -> condition
    health: HealthCheck | None
    mounts: tuple[Mount, ...]
    networks: frozenset[str]
    on_host: bool  # network_mode: host
    extra_hosts: dict[str, str]
    ports: tuple[Published, ...]
    stop_signal: str
    stop_grace_s: float
    raw: dict[str, Any]


class Project(Struct, frozen=True, kw_only=True):
    """A compose file with all that it extends."""

    name: str
    file: Path
    services: dict[str, Service]
    raw: dict[str, Any]


def parse(text: str) -> Any:
    """Read YAML by libyaml where there is one: every test process reads all files at collection."""
    return yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


def load(file: Path, variables: Mapping[str, str] | None = None) -> Project:
    """Read a compose file; `variables` win over the `.env` beside it.

    Raises:
        ComposeError: what is wrong, with the place.
    """
    known = {**dotenv(file.parent / ".env"), **(variables or {})}
    raw = _read(file, known)
    services = {
        name: _service(name, _extended(file, service, known, (name,)), raw, file.parent)
        for name, service in raw.get("services", {}).items()
    }
    _check(services)
    return Project(name=raw.get("name", file.parent.name), file=file, services=services, raw=raw)


def dotenv(file: Path) -> dict[str, str]:
    """Read NAME=VALUE lines; there need be no such file."""
    found = {}
    for number, line in enumerate(file.read_text().splitlines() if file.exists() else (), 1):
        if not line.strip() or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name) or value.strip() != value:
            raise ComposeError(f"{file.name}, line {number}: not NAME=VALUE")
        found[name] = value
    return found


def interpolate(value: Any, variables: Mapping[str, str], where: str = "") -> Any:
    """Put variables in their places, in every string below `value` (keys stay)."""
    if isinstance(value, dict):
        return {k: interpolate(v, variables, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, list):
        return [interpolate(v, variables, f"{where}[{i}]") for i, v in enumerate(value)]
    if not isinstance(value, str):
        return value

    def replaced(found: re.Match[str]) -> str:
        if found["escaped"]:
            return "$"
        name, operator, word = found["plain"] or found["name"], found["operator"], found["word"]
        if name is None:
            raise ComposeError(f"{where}: invalid interpolation in {value!r}")
        given = variables.get(name)
        is_there = given is not None and (given != "" or not (operator or "").startswith(":"))
        match (operator or "")[-1:]:
            case "+":
                return word if is_there else ""
            case "-":
                return given if is_there and given is not None else word
            case "?" if not is_there:
                raise ComposeError(f"{where}: {name} is required: {word}")
        return given or ""

    return _VARIABLE.sub(replaced, value)


def seconds(text: str) -> float:
    """Read a duration: 1m30s."""
    parts = re.findall(r"(\d+(?:\.\d+)?)(ms|s|m|h)", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ComposeError(f"{text!r} is no duration")
    return sum(float(number) * _SECONDS[unit] for number, unit in parts)


# -- files ---------------------------------------------------------------------------------------


def _read(file: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    try:
        tree = parse(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ComposeError(f"{file.name}: {error}") from error
    if not isinstance(tree, dict):
        raise ComposeError(f"{file.name}: must be a mapping")
    if "include" in tree:
        raise ComposeError(f"{file.name}: include is not understood here")
    read: dict[str, Any] = interpolate(tree, variables, file.name)
    return read


def _extended(
    file: Path, service: dict[str, Any], variables: Mapping[str, str], way: tuple[str, ...]
) -> dict[str, Any]:
    extends = service.get("extends")
    if extends is None:
        return service
    if isinstance(extends, str):
        extends = {"service": extends}
    other = file.parent / extends["file"] if "file" in extends else file
    step = f"{other.name}:{extends['service']}"
    if step in way:
        raise ComposeError(f"{way[0]} extends itself: {' -> '.join((*way, step))}")
    try:
        base = _read(other, variables)["services"][extends["service"]]
    except KeyError as error:
        raise ComposeError(f"{way[0]} extends {step}: there is no {error}") from None
    base = _extended(other, base, variables, (*way, step))
    own = {key: value for key, value in service.items() if key != "extends"}
    merged: dict[str, Any] = _merged(_normal(base), _normal(own))
    return merged


def _normal(service: dict[str, Any]) -> dict[str, Any]:
    """Write short forms that merge by name as mappings: environment, depends_on, volumes, …"""
    service = dict(service)
    if isinstance(service.get("environment"), list):
        pairs = (entry.partition("=") for entry in service["environment"])
        service["environment"] = {name: value for name, _, value in pairs}
    if isinstance(service.get("depends_on"), list):
        service["depends_on"] = {n: {"condition": "service_started"} for n in service["depends_on"]}
    if isinstance(service.get("networks"), list):
        service["networks"] = dict.fromkeys(service["networks"])
    if isinstance(service.get("volumes"), list):
        service["volumes"] = {_target(volume): volume for volume in service["volumes"]}
    if isinstance(service.get("extra_hosts"), list):
        pairs = (re.split(r"[:=]", entry, maxsplit=1) for entry in service["extra_hosts"])
        service["extra_hosts"] = dict(pairs)
    return service


def _merged(base: Any, own: Any, key: str = "") -> Any:
    if isinstance(base, dict) and isinstance(own, dict):
        return {
            **base,
            **{k: _merged(base[k], v, k) if k in base else v for k, v in own.items()},
        }
    if isinstance(base, list) and isinstance(own, list) and key not in _REPLACED:
        return [*base, *(entry for entry in own if entry not in base)]
    return own


# -- services ------------------------------------------------------------------------------------


def _service(name: str, tree: dict[str, Any], raw: dict[str, Any], folder: Path) -> Service:
    tree = _normal(tree)
    on_host = tree.get("network_mode") == "host"
    if tree.get("network_mode") not in (None, "host"):
        raise ComposeError(f"{name}: network_mode {tree['network_mode']!r} is not understood here")
    if on_host and (tree.get("networks") or tree.get("ports")):
        raise ComposeError(f"{name}: on the host's network there are no networks and no ports")
    return Service(
        name=name,
        image=tree.get("image", ""),
        entrypoint=_words(name, tree.get("entrypoint")),
        command=_words(name, tree.get("command")),
        environment={k: _env(v) for k, v in (tree.get("environment") or {}).items()},
        depends_on={
            other: how.get("condition", "service_started")
            for other, how in (tree.get("depends_on") or {}).items()
        },
        health=_health(name, tree.get("healthcheck")),
        mounts=tuple(_mounts(name, tree, raw, folder)),
        networks=frozenset(tree.get("networks") or (() if on_host else ("default",))),
        on_host=on_host,
        extra_hosts=tree.get("extra_hosts") or {},
        ports=tuple(_published(name, port) for port in tree.get("ports", ())),
        stop_signal=tree.get("stop_signal", "SIGTERM"),
        stop_grace_s=seconds(tree.get("stop_grace_period", "10s")),
        raw=tree,
    )


def _words(name: str, words: Any) -> tuple[str, ...] | None:
    if words is None:
        return None
    if not isinstance(words, list):
        raise ComposeError(f"{name}: write commands as lists")
    return tuple(str(word) for word in words)


def _env(value: Any) -> str:
    if isinstance(value, bool):
        raise ComposeError("environment: quote true and false")
    return "" if value is None else str(value)


def _health(name: str, tree: dict[str, Any] | None) -> HealthCheck | None:
    if tree is None:
        return None
    test = tree["test"]
    if not isinstance(test, list) or test[0] not in ("CMD", "CMD-SHELL"):
        raise ComposeError(f"{name}: healthcheck.test must be a list that begins with CMD")
    words = tuple(test[1:]) if test[0] == "CMD" else ("sh", "-c", test[1])
    return HealthCheck(
        test=words,
        interval_s=seconds(tree.get("interval", "30s")),
        timeout_s=seconds(tree.get("timeout", "30s")),
        retries=int(tree.get("retries", 3)),
        start_period_s=seconds(tree.get("start_period", "0s")),
    )


def _target(volume: Any) -> str:
    if isinstance(volume, dict):
        return str(volume["target"])
    return str(volume).removesuffix(":ro").removesuffix(":rw").rpartition(":")[2]


def _mounts(name: str, tree: dict[str, Any], raw: dict[str, Any], folder: Path) -> list[Mount]:
    found = []
    for target, volume in (tree.get("volumes") or {}).items():
        if isinstance(volume, dict):
            raise ComposeError(f"{name}: write volumes as SOURCE:TARGET")
        source = volume.partition(":")[0]
        if source.startswith((".", "/", "~")):
            path = (folder / Path(source).expanduser()).resolve()
            found.append(Mount(target=target, source=path))
        elif source in (raw.get("volumes") or {}):
            found.append(Mount(target=target, volume=source))
        else:
            raise ComposeError(f"{name}: volume {source!r} is not declared")
    found += [Mount(target=target.partition(":")[0]) for target in tree.get("tmpfs", ())]
    for kind, where in (("secrets", "/run/secrets/{}"), ("configs", "/{}")):
        for entry in tree.get(kind, ()):
            given = entry if isinstance(entry, dict) else {"source": entry}
            declared = (raw.get(kind) or {}).get(given["source"]) or {}
            target = given.get("target", where.format(given["source"]))
            if "content" in declared and tree.get("read_only"):
                # docker/compose#12031: it is copied in, which a read-only root refuses
                raise ComposeError(f"{name}: read_only, and {kind} {given['source']!r} has content")
            if "content" in declared:
                found.append(Mount(target=target, content=declared["content"]))
            elif "file" in declared:
                source = (folder / Path(declared["file"]).expanduser()).resolve()
                found.append(Mount(target=target, source=source))
            else:
                raise ComposeError(f"{name}: {kind} {given['source']!r} is not declared")
    return found


def _published(name: str, port: Any) -> Published:
    found = re.fullmatch(r"(?:([\d.]+):)?(\d+):(\d+)", str(port))
    if found is None:
        raise ComposeError(f"{name}: write ports as ADDRESS:PORT:PORT")
    return Published(host=found[1] or "0.0.0.0", port=int(found[2]), target=int(found[3]))


def _check(services: Mapping[str, Service]) -> None:
    for service in services.values():
        for other, condition in service.depends_on.items():
            if other not in services:
                raise ComposeError(f"{service.name} depends on {other!r}, which is not there")
            if condition == "service_healthy" and services[other].health is None:
                raise ComposeError(f"{service.name} waits for {other}, which has no health check")
