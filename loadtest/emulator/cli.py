"""`warmroute emulate`: the options of one replica as flags; run it until interrupted."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, get_args, get_origin, get_type_hints

import click
import uvloop
import zmq
from msgspec.structs import replace

from loadtest.emulator.emulator import Emulator
from loadtest.emulator.options import EmulatorOptions
from loadtest.emulator.pool import EmulatedPool, PoolMaster
from loadtest.emulator.script import Script
from loadtest.engine_model.time_model import PRESETS, TimeModel
from router.base.contracts import ALGORITHMS
from router.base.listening import why_not

_TOKENIZERS: Final = ("tokenizer.json", "tokenizer.model", "tekken.json", "tiktoken.model")
_DEFAULTS: Final = EmulatorOptions()


class NamedPath(click.ParamType[tuple[str, str]]):
    """NAME=PATH."""

    name = "name=path"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        name, separator, path = str(value).partition("=")
        if not (name and separator and path):
            self.fail(f"{value!r} is not NAME=PATH", param, ctx)
        return name, path


_NAMES: Final = {
    "model_dir": "--model",
    "served_model_names": "--served-model-name",
    "loras": "--lora",
    "num_window_groups": "--window-groups",
}
"""Flags that are not called as their field is."""

_SPECIAL: Final[Mapping[str, Mapping[str, Any]]] = {
    "model_dir": {
        "type": click.Path(exists=True, file_okay=False, path_type=Path),
        "default": None,
    },
    "served_model_names": {"multiple": True, "default": ()},
    "loras": {"multiple": True, "default": (), "type": NamedPath()},
    "hash_algorithm": {"type": click.Choice([name for name in ALGORITHMS if name != "warmroute"])},
}


def _add_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Make a flag of each field that has a description, with the field's own default."""
    for name, hint in reversed(get_type_hints(EmulatorOptions, include_extras=True).items()):
        if hasattr(hint, "__metadata__"):
            kind, meta = get_args(hint)
            flag = _NAMES.get(name, f"--{name.replace('_', '-')}")
            if kind is bool:
                flag = f"{flag}/--no-{flag[2:]}"
            shape = {"type": _type_of(kind), "default": getattr(_DEFAULTS, name)}
            shape |= _SPECIAL.get(name, {})
            command = click.option(flag, name, help=meta.description, **shape)(command)
    return command


def _type_of(hint: Any) -> Any:
    if get_origin(hint) is Literal:
        return click.Choice(get_args(hint))
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
    return click.Path(dir_okay=False, path_type=Path) if kinds == [Path] else kinds[0]


_TIME_HELP: Final = {
    "base_ms": "per step.",
    "ms_per_prefill_token": "per prompt token.",
    "ms_per_mtoken2": "per million (token, context).",
    "ms_per_decode": "per decoding request.",
    "ms_per_mtoken_context": "per million context tokens that decoding reads.",
}


def _add_times(command: Callable[..., Any]) -> Callable[..., Any]:
    for name, text in reversed(_TIME_HELP.items()):
        flag = f"--{name.replace('_', '-')}"
        command = click.option(flag, type=float, help=f"Overrides --preset: {text}")(command)
    return command


@click.command(context_settings={"show_default": True, "max_content_width": 100})
@_add_flags
@click.option(
    "--serve-pool",
    "pool_port",
    type=int,
    help="Host the emulated pool at this port (0: any), and share it.",
)
@click.option(
    "--pool-bytes", type=int, default=1 << 30, help="Its capacity; least recently used go first."
)
@click.option(
    "--preset",
    type=click.Choice(list(PRESETS)),
    default="h100-8b",
    help="Time model: GPU and model size.",
)
@_add_times
def emulate(preset: str, pool_port: int | None, pool_bytes: int, **flags: Any) -> None:
    """Serve a vLLM-compatible replica without a model.

    Same routes, KV cache, events and metrics as the engine; a time model instead of a GPU. POST
    to /emulator/faults makes it fail on command.
    """
    try:
        options = _options(preset, flags)
        options.model_len()
        if options.script is not None:
            Script.load(options.script)
        if not any((options.model_dir / name).is_file() for name in _TOKENIZERS):
            raise ValueError(
                f"--model {options.model_dir} has no tokenizer.json; name the folder of a model"
            )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        uvloop.run(_run(options, pool_port, pool_bytes))
    except* (OSError, zmq.ZMQError) as errors:
        raise click.ClickException(_why_not(errors.exceptions[0], options, pool_port)) from errors


def _why_not(exc: Exception, options: EmulatorOptions, pool_port: int | None) -> str:
    """Return which of the ports cannot be had, and which flag names another one."""
    if isinstance(exc, zmq.ZMQError):
        why = os.strerror(exc.errno or 0)
        taken = {"--events-port": options.events_port, "--replay-port": options.replay_port}
    elif isinstance(exc, OSError) and exc.filename is None:
        why = why_not(options.host, exc)
        taken = {"--port": options.port} | ({"--serve-pool": pool_port} if pool_port else {})
    else:
        return str(exc)
    given = {flag: port for flag, port in taken.items() if port}
    ports = ", ".join(f"{options.host}:{port}" for port in given.values()) or options.host
    flags = " or ".join(given)
    other = f"; name another port with {flags} (0: any)" if flags else ""
    return f"cannot listen on {ports}: {why}{other}"


def _options(preset: str, flags: dict[str, Any]) -> EmulatorOptions:
    given = {name: value for name, value in flags.items() if value not in (None, ())}
    times = {name: given.pop(name) for name in TimeModel.__struct_fields__ if name in given}
    if "model_dir" in given:
        given.setdefault("served_model_names", (str(given["model_dir"]),))
    return EmulatorOptions(**given, time_model=replace(PRESETS[preset], **times), may_kill=True)


async def _run(options: EmulatorOptions, pool_port: int | None, pool_bytes: int) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        if pool_port is not None:
            pool = EmulatedPool(capacity_bytes=pool_bytes)
            master = await stack.enter_async_context(
                PoolMaster(pool, host=options.host, port=pool_port)
            )
            options = replace(options, pool=master.url)
        replica = await stack.enter_async_context(Emulator(options))
        click.echo(_ready_line(replica))
        await stop.wait()


def _ready_line(replica: Emulator) -> str:
    options = replica.options
    parts = [
        f"emulating {options.served_model_names[0]} at {replica.url}",
        f"{options.num_gpu_blocks} blocks of {options.block_size}, "
        f"max_model_len {replica.replica.max_model_len}",
    ]
    publishers = [r.publisher for r in replica.replica.ranks if r.publisher is not None]
    if publishers:
        endpoints = ", ".join(publisher.config.endpoint for publisher in publishers)
        parts.append(f"events at {endpoints}")
    if options.pool is not None:
        parts.append(f"pool at {options.pool}")
    return "; ".join(parts)
