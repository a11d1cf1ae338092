"""Replicas that answer at once: enough of vLLM for a router to find them and to know them EXACT.

One process, several replicas, each on its own port with its own KV event publisher. What an
engine would compute comes from the request's headers, so that a body is counted, never read:

    x-bench-usage: PROMPT[,CACHED]       the usage of the answer; cached tokens only if given
    x-bench-stream: EVENTS,INTERVAL_MS   answer as so many server-sent events

`POST /bench/publish` (body: a msgpack event batch) publishes KV events. A JSON line on stdout
has the ports.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path
from typing import Final, cast

import click
import msgspec
import uvloop

from loadtest.dev.bench.client import header
from loadtest.dev.bench.setting import TINY_MODEL
from loadtest.emulator.events import EventPublisher, PublisherOptions
from router.base.contracts import HashContract
from router.kv_events.wire import BlockStored, decode

BLOCK_SIZE: Final = 16
MODEL: Final = "tiny"

_METRICS: Final = """\
# fake
vllm:cache_config_info{{block_size="{block_size}",enable_prefix_caching="True",engine="0",\
num_gpu_blocks="1000000",prefix_caching_hash_algo="sha256"}} 1.0
vllm:num_requests_running{{engine="0",model_name="{model}"}} 0.0
vllm:num_requests_waiting{{engine="0",model_name="{model}"}} 0.0
process_start_time_seconds {started_s}
"""
_BUCKETS: Final = "".join(
    f'vllm:bench_{name}_seconds_bucket{{engine="0",le="{le}.0",model_name="{MODEL}"}} {le}.0\n'
    for name in range(20)
    for le in range(40)
)
"""As many lines as the histograms of an engine's page have."""
_CHUNK: Final = (
    b'data: {"id":"chatcmpl-bench","object":"chat.completion.chunk","created":1,"model":"tiny",'
    b'"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'
)


class Replica:
    """One fake replica: its routes' answers and its events."""

    __slots__ = ("_pages", "publisher")

    def __init__(self, model_dir: Path, rank: int = 0) -> None:
        self.publisher = EventPublisher(
            PublisherOptions(host="127.0.0.1", port=0, replay_port=0), rank
        )
        card = {"id": MODEL, "object": "model", "root": str(model_dir), "max_model_len": 1 << 20}
        metrics = _METRICS.format(block_size=BLOCK_SIZE, model=MODEL, started_s=time.time())
        self._pages = {
            b"/v1/models": msgspec.json.encode({"object": "list", "data": [card]}),
            b"/version": b'{"version":"0.32.0"}',
            b"/health": b"",
            b"/metrics": (metrics + _BUCKETS).encode(),
            b"/kv_event_sources": msgspec.json.encode({"0": self.publisher.config}),
        }
        self._publish_first_block()

    def _publish_first_block(self) -> None:
        """Publish a block that shows how this replica hashes: routers know it EXACT from here."""
        tokens = list(range(BLOCK_SIZE))
        keys, _ = HashContract(algorithm="sha256", block_size=BLOCK_SIZE).extend(None, tokens)
        event = BlockStored(
            block_hashes=list(keys), token_ids=tokens, block_size=BLOCK_SIZE, medium="GPU"
        )
        self.publisher.publish([event], time.time())

    def answer(self, target: bytes, head: bytes, body: bytes) -> bytes:
        """Answer a request that is not streamed."""
        if target == b"/bench/publish":
            self.publisher.publish(decode(body, with_tokens=True).events, time.time())
            return _whole(b"{}")
        page = self._pages.get(target)
        return _whole(page if page is not None else completion(head))


class Exchange(asyncio.Protocol):
    """Reads requests by their length alone and answers each."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()  # head, and the body where it is wanted
        self._head = b""
        self._num_missing = 0  # bytes of the body that did not come yet; -1: still in the head

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        if not self._head:
            self._buffer += data
            at = self._buffer.find(b"\r\n\r\n")
            if at < 0:
                return
            self._head = bytes(self._buffer[:at])
            del self._buffer[: at + 4]
            self._num_missing = int(header(self._head, b"content-length") or 0) - len(self._buffer)
        else:
            self._num_missing -= len(data)
            if self._target.startswith(b"/bench"):
                self._buffer += data
        if self._num_missing <= 0:
            self._answer()

    @property
    def _target(self) -> bytes:
        return self._head.split(b" ", 2)[1]

    def _answer(self) -> None:
        assert self._transport is not None
        head, body = self._head, bytes(self._buffer)
        streamed = header(head, b"x-bench-stream")
        if streamed is None:
            self._transport.write(self._replica.answer(self._target, head, body))
        else:
            num_events, interval_ms = streamed.split(",")
            self._transport.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n"
            )
            self._stream(head, int(num_events), float(interval_ms) / 1000)
        self._buffer.clear()
        self._head = b""

    def _stream(self, head: bytes, num_left: int, interval_s: float) -> None:
        """Send the next event and come back for those left; without an interval, all at once."""
        assert self._transport is not None
        if self._transport.is_closing():
            return
        if num_left and interval_s:
            self._transport.write(_chunk(_CHUNK))
            loop = asyncio.get_running_loop()
            loop.call_later(interval_s, self._stream, head, num_left - 1, interval_s)
            return
        end = b"data: " + completion(head) + b"\n\ndata: [DONE]\n\n"
        self._transport.write(_chunk(_CHUNK) * num_left + _chunk(end) + b"0\r\n\r\n")


def completion(head: bytes) -> bytes:
    """Write an answer's JSON with the usage that the request's header says."""
    usage = header(head, b"x-bench-usage")
    if usage is None:
        return _completion(None, None)
    prompt, _, cached = usage.partition(",")
    return _completion(int(prompt), int(cached) if cached else None)


def _completion(num_prompt_tokens: int | None, num_cached_tokens: int | None) -> bytes:
    usage = b""
    if num_prompt_tokens is not None:
        details = b""
        if num_cached_tokens is not None:
            details = b',"prompt_tokens_details":{"cached_tokens":%d}' % num_cached_tokens
        usage = b',"usage":{"prompt_tokens":%d,"completion_tokens":1,"total_tokens":%d%s}' % (
            num_prompt_tokens,
            num_prompt_tokens + 1,
            details,
        )
    return (
        b'{"id":"chatcmpl-bench","object":"chat.completion","created":1,"model":"tiny","choices":'
        b'[{"index":0,"message":{"role":"assistant","content":"ok"},"finish_reason":"stop"}]'
        b"%s}" % usage
    )


def _whole(body: bytes) -> bytes:
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % len(body)
    ) + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


async def serve(num_replicas: int, model_dir: Path) -> None:
    """Serve until cancelled."""
    loop = asyncio.get_running_loop()
    replicas = [Replica(model_dir) for _ in range(num_replicas)]
    servers = [
        await loop.create_server(partial(Exchange, replica), "127.0.0.1", 0) for replica in replicas
    ]
    ports = [server.sockets[0].getsockname()[1] for server in servers]
    click.echo(msgspec.json.encode({"ports": ports}))
    async with asyncio.TaskGroup() as group:
        for replica in replicas:
            group.create_task(replica.publisher.serve_replays(), name="replays")


@click.command()
@click.option("--replicas", type=click.IntRange(min=1), default=1)
@click.option("--model", "model_dir", type=click.Path(path_type=Path), default=TINY_MODEL)
def main(replicas: int, model_dir: Path) -> None:
    """Serve fake replicas until killed."""
    uvloop.run(serve(replicas, model_dir))


if __name__ == "__main__":
    main()
