"""Every option of an emulated replica, with the defaults, in one frozen struct."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from loadtest.emulator.block_manager import HashForm
from loadtest.emulator.time_model import PRESETS, TimeModel
from loadtest.emulator.transfers import Connector
from loadtest.emulator.wire import VERSION
from router.contracts import DEFAULT_SEED, MAX_LOOKAHEAD, Algorithm, HashContract
from router.kv_events.wire import WireShape

TINY_MODEL = Path(__file__).resolve().parent.parent / "tiny_model"

KvRole = Literal["both", "producer", "consumer"]
ReplyKind = Literal["words", "echo", "greedy"]


class EmulatorOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One replica. Ports of 0 are chosen by the system and known to the running `Emulator`.

    `num_gpu_blocks` counts the null block. `max_model_len` None: what the model's config and the
    cache allow. `events_port` and `replay_port` are rank 0's; rank r adds r to them.
    """

    # where it listens
    host: str = "127.0.0.1"
    port: int = 0
    # what it serves
    model_dir: Path = TINY_MODEL
    served_model_names: tuple[str, ...] = ("tiny",)
    loras: tuple[tuple[str, str], ...] = ()  # (name, path)
    max_model_len: int | None = None
    chat_template_kwargs: dict[str, Any] = {}  # vLLM's --default-chat-template-kwargs
    version: str = VERSION  # of vLLM; from 0.33 on its Responses route heeds the rank header
    # the cache
    block_size: int = 16
    num_gpu_blocks: int = 16384
    kv_cache_dtype: str = "auto"  # reported; in a pool it reads other types' objects all the same
    sliding_window: int | None = None  # tokens, of layers beside those of full attention
    num_window_groups: int = 1  # KV groups of such layers
    enable_prefix_caching: bool = True
    eagle: bool = False  # drop the last block of each hit, as with EAGLE or MTP
    lookahead: int = 0  # tokens behind a block that its hash covers, as with EAGLE or MTP from 0.33
    hash_algorithm: Algorithm = "sha256"
    hash_seed: str = DEFAULT_SEED
    hash_tagged: bool = True
    # the scheduler
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    data_parallel_size: int = 1
    first_rank: int = 0  # global number of its first rank, as in hybrid and external load balancing
    # its events
    events: bool = True
    events_port: int = 0
    replay_port: int = 0
    events_topic: str = ""
    event_shape: WireShape = "map"
    hash_form: HashForm = "int"
    buffer_steps: int = 10_000
    replay_topic_frame: bool = True  # False: replies as before vllm#45174
    # its shared pool
    pool: str | None = None  # URL of an emulated pool's master; None: no connector
    ms_per_fetched_token: float = 0.01
    kv_role: KvRole = "both"  # a consumer saves nothing
    connector: Connector = "none"  # peer to peer
    # time
    time_model: TimeModel = PRESETS["h100-8b"]
    speed: float = 1.0  # 10.0: everything takes a tenth of the time
    tick_ms: float = 2.0  # answers of steps shorter than this are delivered together
    # replies
    reply: ReplyKind = "words"
    reply_tokens: int = 128  # median of the natural length, where max_tokens does not cut it
    reply_sigma: float = 0.0  # spread of the natural length (log-normal); 0.0: always the median
    tool_call_ratio: float = 0.0  # share of requests with tools that are answered by a call
    hold_tool_calls: bool = False  # a call's arguments are sent at its end, as some parsers do
    sse_keep_alive_interval: float = (
        0.0  # seconds; chat and completions, as in vLLM; 0: no comments
    )
    script: Path | None = None  # what is said to requests with tools, step by step
    tokenize: bool = True  # False: no tokens, no cache, no scheduler; for overhead benchmarks
    seed: int = 0
    realtime: bool = False  # the model takes /v1/realtime
    keep_responses: bool = False  # VLLM_ENABLE_RESPONSES_API_STORE of vLLM
    # faults
    request_log: Path | None = None  # a JSON line at the start and the end of each generation
    may_kill: bool = False  # whether the `kill` fault ends the process, or just the replica

    def contract(self) -> HashContract:
        """Return how this replica names its blocks."""
        return HashContract(
            algorithm=self.hash_algorithm,
            block_size=self.block_size,
            seed=self.hash_seed,
            tagged=self.hash_tagged,
            lookahead=self.lookahead,
        )

    def model_len(self) -> int:
        """Settle the longest sequence: configured, or what the model and the cache allow.

        Raises:
            ValueError: The configured length does not fit the cache, or a number is not positive.
        """
        for name in (
            "block_size",
            "max_num_batched_tokens",
            "max_num_seqs",
            "data_parallel_size",
            "speed",
        ):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        self._check_windows()
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
        """Count the tokens of a rank's cache as vLLM does: of requests as long as the longest.

        Source: get_kv_cache_capacity in vllm/v1/core/kv_cache_utils.py, 0.32.0.
        """
        longest = self.model_len()
        num_whole = -(-longest // self.block_size)
        num_blocks = num_whole
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
        if self.pool is not None or self.event_shape == "array":
            raise ValueError("sliding_window: not with a pool, and not with events as arrays")
        if self.eagle or self.lookahead:
            raise ValueError("sliding_window: not with eagle or lookahead")

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
