"""Every option of an emulated replica, with the defaults, in one frozen struct.

A field with a description is a flag of `warmroute emulate`, see `loadtest.emulator.cli`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta, Struct

from loadtest.emulator.transfers import Connector
from loadtest.emulator.wire import VERSION
from loadtest.engine_model.time_model import PRESETS, TimeModel
from router.base.contracts import DEFAULT_SEED, MAX_LOOKAHEAD, Algorithm, HashContract

TINY_MODEL: Final = Path(__file__).resolve().parent.parent / "tiny_model"

KvRole = Literal["both", "producer", "consumer"]
ReplyKind = Literal["words", "echo"]

_POSITIVE: Final = (
    "block_size",
    "max_num_batched_tokens",
    "max_num_seqs",
    "data_parallel_size",
    "speed",
)


def _says(description: str) -> Meta:
    return Meta(description=description)


class EmulatorOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One replica. Ports of 0 are chosen by the system and known to the running `Emulator`."""

    # addresses
    host: Annotated[str, _says("Address to listen on, for HTTP and events.")] = "127.0.0.1"
    port: Annotated[int, _says("HTTP port; 0: any free one.")] = 0
    # the model
    model_dir: Annotated[
        Path,
        _says("Model directory: tokenizer, chat template, config.json.  [default: a tiny one]"),
    ] = TINY_MODEL
    served_model_names: Annotated[
        tuple[str, ...], _says("Name in the API; repeatable.  [default: tiny, or --model]")
    ] = ("tiny",)
    loras: Annotated[tuple[tuple[str, str], ...], _says("Adapter as NAME=PATH; repeatable.")] = ()
    max_model_len: Annotated[int | None, _says("Longest sequence.  [default: what fits]")] = None
    chat_template_kwargs: dict[str, Any] = {}  # vLLM's --default-chat-template-kwargs
    version: str = VERSION  # of vLLM; from 0.33 on its Responses route reads the rank header
    # the cache
    block_size: Annotated[int, _says("Tokens per KV block.")] = 16
    num_gpu_blocks: Annotated[int, _says("KV blocks per rank, the null block among them.")] = 16384
    kv_cache_dtype: Annotated[str, _says("Data type of the KV cache, as it is reported.")] = "auto"
    sliding_window: Annotated[
        int | None,
        _says(
            "Tokens that some layers see: they have KV groups of their own.  "
            "[default: all layers see all]"
        ),
    ] = None
    num_window_groups: Annotated[int, _says("KV groups of such layers.")] = 1
    cpu_blocks: Annotated[
        int, _says("KV blocks of a CPU tier per rank, as of vLLM's offloading connector; 0: none.")
    ] = 0
    ms_per_cpu_token: Annotated[float, _says("Time to read a token from the CPU tier.")] = 0.003
    enable_prefix_caching: Annotated[bool, _says("Reuse blocks of earlier prompts.")] = True
    eagle: Annotated[
        bool, _says("Drop the last block of each hit, as with EAGLE or MTP until vLLM 0.32.")
    ] = False
    lookahead: Annotated[
        int,
        _says("Tokens after each block that its hash covers, as with EAGLE or MTP from vLLM 0.33."),
    ] = 0
    hash_algorithm: Annotated[
        Algorithm, _says("How blocks are named (--prefix-caching-hash-algo of vLLM).")
    ] = "sha256"
    hash_seed: Annotated[
        str, _says("Text behind the hash of nothing (PYTHONHASHSEED of vLLM).")
    ] = DEFAULT_SEED
    # the scheduler
    max_num_batched_tokens: Annotated[int, _says("Token budget of a step.")] = 8192
    max_num_seqs: Annotated[int, _says("Requests that run at once.")] = 256
    data_parallel_size: Annotated[int, _says("Ranks, each with its own cache and events.")] = 1
    first_rank: Annotated[
        int, _says("Number of its first rank among the ranks of all replicas.")
    ] = 0
    # its events
    events: Annotated[bool, _says("Publish KV events.")] = True
    events_port: Annotated[int, _says("Rank 0's event port, rank r adds r; 0: any.")] = 0
    replay_port: Annotated[int, _says("Rank 0's replay port, rank r adds r; 0: any.")] = 0
    buffer_steps: Annotated[int, _says("Event batches kept for replay.")] = 10_000
    # KV from elsewhere
    pool: Annotated[
        str | None, _says("URL of the emulated pool to share: another replica's --serve-pool.")
    ] = None
    ms_per_fetched_token: Annotated[float, _says("Time to fetch from the pool.")] = 0.01
    kv_role: Annotated[
        KvRole, _says("Its half of a request: a consumer saves nothing to the pool.")
    ] = "both"
    connector: Annotated[
        Connector,
        _says("How it transfers KV peer to peer; its HTTP port is its bootstrap server, too."),
    ] = "none"
    # time
    time_model: TimeModel = PRESETS["h100-8b"]
    speed: Annotated[float, _says("Run so many times as fast.")] = 1.0
    tick_ms: Annotated[
        float, _says("Deliver the tokens of shorter steps together, at most this late.")
    ] = 2.0
    # replies
    reply: Annotated[ReplyKind, _says("Pseudo-words, or the last message again.")] = "words"
    reply_tokens: Annotated[int, _says("Natural length of a reply.")] = 128
    tool_call_ratio: Annotated[
        float, _says("Share of requests with tools that are answered by a call.")
    ] = 0.0
    sse_keep_alive_interval: Annotated[
        float,
        _says("Seconds of silence until a chat or completion stream has a comment; 0: never."),
    ] = 0.0
    script: Annotated[
        Path | None,
        _says("Answers to requests with tools: a JSON list of {text} and {call, arguments}."),
    ] = None
    seed: Annotated[int, _says("Of replies and faults.")] = 0
    # faults
    request_log: Annotated[
        Path | None, _says("Append a JSON line at the start and at the end of each generation.")
    ] = None
    may_kill: bool = False  # whether the `kill` fault ends the process, or just the replica

    def contract(self) -> HashContract:
        """Return how this replica names its blocks."""
        return HashContract(
            algorithm=self.hash_algorithm,
            block_size=self.block_size,
            seed=self.hash_seed,
            lookahead=self.lookahead,
        )

    def model_len(self) -> int:
        """Return the longest sequence: configured, or what the model and the cache allow.

        Raises:
            ValueError: The configured length exceeds the cache, or options contradict each other.
        """
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        self._check_windows()
        if self.cpu_blocks < 0 or not self.ms_per_cpu_token >= 0.0:
            raise ValueError(
                f"cpu_blocks and ms_per_cpu_token must not be negative, got {self.cpu_blocks} and "
                f"{self.ms_per_cpu_token}"
            )
        if self.cpu_blocks and (
            self.pool is not None or self.eagle or self.lookahead or self.sliding_window is not None
        ):
            raise ValueError("cpu_blocks: not with a pool, eagle, lookahead or sliding_window")
        if self.lookahead and (self.eagle or self.pool is not None):
            raise ValueError("lookahead: not with eagle, and not with a pool")
        if not 0 <= self.lookahead <= MAX_LOOKAHEAD:
            raise ValueError(f"lookahead must be in 0..{MAX_LOOKAHEAD}, got {self.lookahead}")
        capacity = self._num_sequence_blocks() * self.block_size
        wanted = self.max_model_len
        if wanted is None:
            wanted = min(capacity, _max_positions(self.model_dir))
        if not 0 < wanted <= capacity:
            raise ValueError(
                f"max_model_len {wanted} needs {-(-wanted // self.block_size) + 1} blocks of "
                f"{self.block_size} tokens, num_gpu_blocks is {self.num_gpu_blocks}"
            )
        return wanted

    def num_cache_tokens(self) -> int:
        """Count the tokens of a rank's cache as vLLM does: of requests of the longest length.

        Source: get_kv_cache_capacity in vllm/v1/core/kv_cache_utils.py, 0.32.0.
        """
        longest = self.model_len()
        num_blocks = -(-longest // self.block_size)
        if self.sliding_window is not None:
            seen = min(longest, self.sliding_window - 1 + self.max_num_batched_tokens)
            num_blocks += self.num_window_groups * (-(-seen // self.block_size) + 1)
        return int(self.num_gpu_blocks / num_blocks * longest)

    def _check_windows(self) -> None:
        if self.sliding_window is None:
            return
        if self.sliding_window < 1 or not 1 <= self.num_window_groups <= 16:
            raise ValueError(
                f"sliding_window must be positive and num_window_groups in 1..16, got "
                f"{self.sliding_window} and {self.num_window_groups}"
            )
        if self.pool is not None or self.eagle or self.lookahead:
            raise ValueError("sliding_window: not with a pool, eagle or lookahead")

    def _num_sequence_blocks(self) -> int:
        """Count the blocks of tokens that one sequence can have."""
        num_blocks = self.num_gpu_blocks - 1
        if self.sliding_window is None:
            return num_blocks
        num_seen = -(-(self.sliding_window + self.max_num_batched_tokens) // self.block_size) + 1
        groups = self.num_window_groups
        return max(num_blocks // (1 + groups), num_blocks - groups * num_seen)


def _max_positions(model_dir: Path) -> int:
    path = model_dir / "config.json"
    if not path.is_file():
        return 131_072
    config: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    config = config.get("text_config") or config
    return int(config.get("max_position_embeddings", 131_072))
