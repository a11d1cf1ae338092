"""`warmroute emulate`: the options of one replica as flags; run it until interrupted."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import click
import uvloop
import zmq
from msgspec.structs import replace

from loadtest.emulator.emulator import Emulator
from loadtest.emulator.options import EmulatorOptions
from loadtest.emulator.pool import EmulatedPool, PoolMaster
from loadtest.emulator.script import Script
from loadtest.emulator.time_model import PRESETS, TimeModel
from router.contracts import ALGORITHMS
from router.listening import why_not

DEFAULTS = EmulatorOptions()

Command = TypeVar("Command", bound=Callable[..., Any])


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


def option(flag: str, field: str, text: str, **kwargs: Any) -> Callable[[Command], Command]:
    """Make a flag for one field of the options, with the field's own default."""
    default = getattr(DEFAULTS, field)
    return click.option(flag, field, default=default, show_default=True, help=text, **kwargs)


@click.command(context_settings={"show_default": True, "max_content_width": 100})
@option("--host", "host", "Address to listen on, for HTTP and events.")
@option("--port", "port", "HTTP port; 0: any free one.")
@click.option(
    "--model",
    "model_dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=None,
    help="Model directory (tokenizer, chat template, config.json; no weights). "
    "[default: a bundled tiny one]",
)
@click.option(
    "--served-model-name",
    "served_model_names",
    multiple=True,
    help="Name in the API; repeatable. [default: tiny, or the --model directory]",
)
@click.option("--lora", "loras", type=NamedPath(), multiple=True, help="Adapter; repeatable.")
@click.option(
    "--max-model-len", type=int, default=None, help="Longest sequence. [default: what fits]"
)
@option("--block-size", "block_size", "Tokens per KV block.")
@option("--num-gpu-blocks", "num_gpu_blocks", "KV blocks per rank, the null block among them.")
@option("--kv-cache-dtype", "kv_cache_dtype", "Data type of the KV cache, as it is reported.")
@option(
    "--sliding-window",
    "sliding_window",
    "Tokens that some layers see: they have KV groups of their own. [default: all layers see all]",
    type=int,
)
@option("--window-groups", "num_window_groups", "KV groups of such layers.")
@option(
    "--eagle/--no-eagle",
    "eagle",
    "Drop the last block of each hit, as with EAGLE or MTP until vLLM 0.32.",
)
@option(
    "--lookahead",
    "lookahead",
    "Tokens after each block that its hash covers, as with EAGLE or MTP from vLLM 0.33.",
)
@option(
    "--enable-prefix-caching/--no-enable-prefix-caching",
    "enable_prefix_caching",
    "Reuse blocks of earlier prompts.",
)
@option(
    "--hash-algorithm",
    "hash_algorithm",
    "How blocks are named (--prefix-caching-hash-algo of vLLM).",
    type=click.Choice([name for name in ALGORITHMS if name != "warmroute"]),
)
@option("--hash-seed", "hash_seed", "Text behind the hash of nothing (PYTHONHASHSEED of vLLM).")
@option(
    "--hash-tagged/--no-hash-tagged",
    "hash_tagged",
    "Whether salts and adapters are hashed with their kind (vLLM 0.32) or bare (before).",
)
@option("--max-num-batched-tokens", "max_num_batched_tokens", "Token budget of a step.")
@option("--max-num-seqs", "max_num_seqs", "Requests that run at once.")
@option("--data-parallel-size", "data_parallel_size", "Ranks, each with its own cache and events.")
@option("--first-rank", "first_rank", "Its first rank's number among those of other replicas.")
@option("--events/--no-events", "events", "Publish KV events.")
@option("--events-port", "events_port", "Rank 0's event port, rank r adds r; 0: any.")
@option("--replay-port", "replay_port", "Rank 0's replay port, rank r adds r; 0: any.")
@option("--events-topic", "events_topic", "Topic frame of the events.")
@option(
    "--event-shape",
    "event_shape",
    "Events as maps (vLLM 0.32) or arrays (0.17).",
    type=click.Choice(["map", "array"]),
)
@option(
    "--hash-form",
    "hash_form",
    "Blocks in events by 64-bit number or by all their bytes.",
    type=click.Choice(["int", "bytes"]),
)
@option("--buffer-steps", "buffer_steps", "Event batches kept for replay.")
@option(
    "--replay-topic-frame/--no-replay-topic-frame",
    "replay_topic_frame",
    "Replay replies with the topic frame, or without (before the fix of vllm#45174).",
)
@option(
    "--keep-responses/--no-keep-responses",
    "keep_responses",
    "Keep what /v1/responses issues (VLLM_ENABLE_RESPONSES_API_STORE of vLLM).",
)
@option("--realtime/--no-realtime", "realtime", "Speak /v1/realtime, as a model that can does.")
@option("--pool", "pool", "URL of the emulated pool to share: another replica's --serve-pool.")
@option("--ms-per-fetched-token", "ms_per_fetched_token", "Time to fetch from the pool.")
@option(
    "--kv-role",
    "kv_role",
    "Its half of a request: a consumer saves nothing to the pool.",
    type=click.Choice(["both", "producer", "consumer"]),
)
@option(
    "--connector",
    "connector",
    "How it transfers KV peer to peer; its HTTP port is its bootstrap server, too.",
    type=click.Choice(["none", "mooncake", "nixl", "nixl_push"]),
)
@click.option(
    "--serve-pool",
    "pool_port",
    type=int,
    default=None,
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
@click.option("--base-ms", type=float, default=None, help="Overrule: per step.")
@click.option("--ms-per-prefill-token", type=float, default=None, help="Overrule.")
@click.option(
    "--ms-per-mtoken2", type=float, default=None, help="Overrule: per million (token, context)."
)
@click.option("--ms-per-decode", type=float, default=None, help="Overrule: per decoding request.")
@click.option(
    "--ms-per-mtoken-context",
    type=float,
    default=None,
    help="Overrule: per million context tokens that decoding reads.",
)
@option("--speed", "speed", "Run so many times as fast.")
@option("--tick-ms", "tick_ms", "Deliver the tokens of shorter steps together, at most this late.")
@option(
    "--reply",
    "reply",
    "Say pseudo-words, the last message again, or words that each follow from the one before.",
    type=click.Choice(["words", "echo", "greedy"]),
)
@option("--reply-tokens", "reply_tokens", "Median natural length of a reply.")
@option("--reply-sigma", "reply_sigma", "Spread of it (log-normal); 0: always the median.")
@option("--tool-call-ratio", "tool_call_ratio", "Share of requests with tools that call one.")
@option(
    "--hold-tool-calls",
    "hold_tool_calls",
    "Send the arguments of a call at its end: some parsers hold them back.",
    is_flag=True,
)
@option(
    "--sse-keep-alive-interval",
    "sse_keep_alive_interval",
    "Seconds of silence after which a stream has a comment; 0: never. Chat and completions.",
)
@click.option(
    "--script",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="What to say to requests with tools: a JSON list of {text} and {call, arguments}.",
)
@option("--seed", "seed", "Of replies and faults.")
@click.option(
    "--request-log",
    type=click.Path(dir_okay=False, path_type=Path),
    default=None,
    help="Append a JSON line at the start and at the end of each generation.",
)
@click.option(
    "--instant",
    is_flag=True,
    help="No time model, long ticks, no tokenization, cache or events: a fast upstream for "
    "measuring what a router adds. With --tokenize only time is left out.",
)
@click.option(
    "--tokenize/--no-tokenize", default=None, help="Count tokens and keep a cache. [default: yes]"
)
def emulate(
    preset: str,
    instant: bool,
    tokenize: bool | None,
    pool_port: int | None,
    pool_bytes: int,
    **flags: Any,
) -> None:
    """Serve a vLLM-compatible replica without a model.

    Same routes, KV cache, events and metrics as the engine; a time model instead of a GPU. POST
    to /emulator/faults makes it fail on command.
    """
    try:
        options = _options(preset, instant, tokenize, flags)
        options.model_len()
        if options.script is not None:
            Script.load(options.script)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        uvloop.run(_run(options, pool_port, pool_bytes))
    except* (OSError, zmq.ZMQError) as errors:
        raise click.ClickException(_why_not(errors.exceptions[0], options)) from errors


def _why_not(exc: Exception, options: EmulatorOptions) -> str:
    if isinstance(exc, OSError) and exc.filename is None:
        return f"cannot listen on {options.host}: {why_not(options.host, exc)}"
    return str(exc)


def _options(
    preset: str, instant: bool, tokenize: bool | None, flags: dict[str, Any]
) -> EmulatorOptions:
    model = PRESETS["instant" if instant else preset]
    overruled = {
        name: value
        for name in TimeModel.__struct_fields__
        if (value := flags.pop(name)) is not None
    }
    flags = {name: value for name, value in flags.items() if value not in (None, ())}
    if "model_dir" in flags and "served_model_names" not in flags:
        flags["served_model_names"] = (str(flags["model_dir"]),)
    if tokenize is None:
        tokenize = not instant
    if not tokenize:
        flags["events"] = False
    return EmulatorOptions(
        **flags,
        time_model=replace(model, **overruled),
        tokenize=tokenize,
        may_kill=True,
    )


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
    parts = [f"emulating {replica.options.served_model_names[0]} at {replica.url}"]
    parts.append(
        f"{replica.options.num_gpu_blocks} blocks of {replica.options.block_size}, "
        f"max_model_len {replica.replica.max_model_len}"
    )
    publishers = [r.publisher for r in replica.replica.ranks if r.publisher is not None]
    if publishers:
        endpoints = ", ".join(publisher.config.endpoint for publisher in publishers)
        parts.append(f"events at {endpoints}")
    if replica.options.pool is not None:
        parts.append(f"pool at {replica.options.pool}")
    return "; ".join(parts)
