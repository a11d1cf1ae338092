"""A replica's pages about itself: JSON answers decoded into typed structs, and `/metrics`.

What must live here: decoding, and its limits. What must not: I/O. A replica may be broken or
hostile. An answer of another shape is a ValueError.
A figure of `/metrics` that makes no sense (no number, negative, larger than any
engine's) is None, as if it were missing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from router.base.contracts import MAX_BLOCK_SIZE
from router.base.decoding import decoder
from router.base.engines import ROLE_OF_KIND, TRANSFER_OF_CONNECTOR, Role, Transfer
from router.kv_events.subscriber import EventSource
from router.replicas.replica import ServedModel

MAX_RANKS: Final = 256
"""Most ranks of one replica; each costs three sockets, and is a candidate of its own."""

MAX_COUNT: Final = 1 << 40  # of blocks, tokens, requests

_MAX_RANK: Final = 65_535  # two bytes in vLLM (v1/engine/core_client.py); global, of many replicas
_MAX_LINES: Final = 2 * MAX_RANKS  # of one metric
_MAX_LINE_CHARS: Final = 4_096

_LABELS: Final = re.compile(r'\b(\w+)="((?:[^"\\]|\\.)*)"', re.ASCII)

SleepState = Literal["awake", "asleep", "emptied", "paused"]
"""Emptied: asleep, and it lost its KV cache. Paused: whether it lost it is not known."""


class EngineMetrics:
    """A page. Lines are searched for: a full parse of a page takes 20 ms of the loop."""

    __slots__ = ("_page",)

    def __init__(self, body: bytes) -> None:
        self._page = "\n" + body.decode(errors="replace")

    def cache_config(self) -> dict[str, str]:
        """Read the labels of vllm:cache_config_info (rank 0 speaks for all)."""
        return next((_labels(line) for line in self._samples("vllm:cache_config_info")), {})

    def cache_shapes(self) -> frozenset[tuple[str, ...]]:
        """Read what stays the same while a process lives: its ranks' blocks and their names."""
        names = ("block_size", "num_gpu_blocks", "prefix_caching_hash_algo", "cache_dtype")
        found = [_labels(line) for line in self._samples("vllm:cache_config_info")]
        return frozenset(tuple(labels.get(name, "") for name in names) for labels in found)

    def by_rank(self, name: str) -> dict[int, int]:
        """Read a gauge with an `engine` label: global rank -> value, summed over models."""
        ranks: dict[int, int] = {}
        for line in self._samples(name):
            rank = rank_of(_labels(line).get("engine", "0"))
            if rank is not None:
                value = in_range(round(_value(line) or 0.0), MAX_COUNT) or 0
                ranks[rank] = ranks.get(rank, 0) + value
        return ranks

    def sums_by_rank(self, name: str) -> dict[int, float]:
        """Read the same with fractions; only values that a rank can have."""
        ranks: dict[int, float] = {}
        for line in self._samples(name):
            rank, value = rank_of(_labels(line).get("engine", "0")), _value(line)
            if rank is not None and value is not None and 0.0 <= value <= MAX_COUNT:
                ranks[rank] = ranks.get(rank, 0.0) + value
        return ranks

    def sleep(self) -> SleepState:
        """Read whether the engine sleeps; all its ranks do, or none."""
        found = {
            _labels(line).get("sleep_state"): _value(line)
            for line in self._samples("vllm:engine_sleep_state")
        }
        if found.get("awake") != 0.0:
            return "awake"
        return "emptied" if found.get("weights_offloaded") or found.get("discard_all") else "asleep"

    def started_s(self) -> float | None:
        """Read when the process started, unix seconds."""
        return next((_value(line) for line in self._samples("process_start_time_seconds")), None)

    def mentions(self, prefix: str) -> bool:
        """Return whether there is a metric with this prefix."""
        return prefix in self._page

    def _samples(self, name: str) -> list[str]:
        """Find the lines of one metric."""
        lines: list[str] = []
        page, start = self._page, 0
        while len(lines) < _MAX_LINES and (at := page.find(f"\n{name}", start)) >= 0:
            end = page.find("\n", at + 1)
            end = len(page) if end < 0 else end
            behind = page[at + 1 + len(name) : at + 2 + len(name)]
            if end - at <= _MAX_LINE_CHARS and behind in ("{", " "):
                lines.append(page[at + 1 : end])
            start = at + 1
        return lines


NO_METRICS: Final = EngineMetrics(b"")


def block_size(text: str | None) -> int | None:
    """Read the tokens of a block."""
    return in_range(_int(text), MAX_BLOCK_SIZE) or None


def count(text: str | None) -> int | None:
    """Read a number of blocks or tokens."""
    return in_range(_int(text), MAX_COUNT)


def flag(text: str | None) -> bool | None:
    """Read what Python printed of a bool."""
    return {"True": True, "False": False}.get(text or "")


def rank_of(text: str) -> int | None:
    """Read a global rank."""
    return in_range(_int(text), _MAX_RANK)


def in_range(number: int | None, limit: int) -> int | None:
    """Return a number in [0, limit]; None for any other."""
    return number if number is not None and 0 <= number <= limit else None


def _labels(line: str) -> dict[str, str]:
    return dict(_LABELS.findall(line))


def _value(line: str) -> float | None:
    """Read a sample's value; None: it is no finite number."""
    try:
        value = float(line.rpartition(" ")[2])
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _int(text: str | None) -> int | None:
    """Read a plain decimal number, of at most 18 digits."""
    if text is None or len(text) > 18 or not (text.isascii() and text.isdigit()):
        return None
    return int(text)


MAX_MODELS: Final = 1_024
"""Adapters included; of each base model a tokenizer is loaded."""

_EAGLES: Final = frozenset({"eagle", "eagle3", "mtp"})
_UNTIL_0_32: Final = frozenset({"dflash", "dspark"})
"""Methods of speculative decoding that want the last block computed again. Source:
`needs_eagle_block_drop` in vllm/config/speculative.py, 0.33.0, and `use_eagle` there, 0.32.0."""

_QUANTIZATIONS: Final = {
    "auto_gptq": "gptq",
    "gptq_marlin": "gptq",
    "auto_awq": "awq",
    "awq_marlin": "awq",
}
"""Names of one method, by release and kernel; of vLLM 0.32.0, `get_quantization_config`."""

Name = Annotated[str, Meta(min_length=1, max_length=512)]


class _ModelEntry(Struct, frozen=True):
    id: Name
    root: Annotated[str, Meta(max_length=4_096)] | None = None
    parent: Annotated[str, Meta(max_length=512)] | None = None
    max_model_len: int | None = None


class _ModelList(Struct):
    data: list[_ModelEntry]


class _Version(Struct):
    version: Annotated[str, Meta(max_length=256)] | None = None


_Word = Annotated[str, Meta(max_length=256)] | None


class _Extra(Struct):
    cache_prefix: _Word | int | float | bool = ""


class _Connector(Struct):
    kv_connector: Annotated[str, Meta(max_length=256)] | None = None
    kv_role: Annotated[str, Meta(max_length=64)] | None = None
    kv_connector_extra_config: _Extra | None = None

    @property
    def cache_prefix(self) -> str:
        """The prefix of its objects' keys; empty: none."""
        extra = self.kv_connector_extra_config
        return str(extra.cache_prefix) if extra is not None else ""


class _Connectors(_Extra):
    connectors: Annotated[list[_Connector], Meta(max_length=64)] = []


class _KvTransfer(_Connector):
    kv_connector_extra_config: _Connectors | None = None

    @property
    def connectors(self) -> list[_Connector]:
        """Return a connector itself, or the connectors of a MultiConnector, in their order."""
        extra = self.kv_connector_extra_config
        if self.kv_connector == "MultiConnector" and extra is not None:
            return extra.connectors
        return [self]


class _Speculation(Struct):
    method: Annotated[str, Meta(max_length=64)] | None = None
    disable_eagle_block_drop: bool = False
    disable_lookahead_block_hashes: bool | None = None  # None: a release before 0.33

    def drops_last(self, *, has_connector: bool) -> bool:
        """Return whether the last block of each hit is dropped."""
        if self.disable_eagle_block_drop:
            return False
        if self.disable_lookahead_block_hashes is None:
            return self.method in _EAGLES or self.method in _UNTIL_0_32
        hashes_ahead = not self.disable_lookahead_block_hashes and not has_connector
        return self.method in _EAGLES and not hashes_ahead


class _ModelConfig(Struct):
    model: Annotated[str, Meta(max_length=4_096)] = ""
    quantization: _Word = None
    dtype: _Word = None
    revision: _Word = None

    @property
    def weights(self) -> dict[str, str]:
        """Their kind, by field. Only some releases name a hub's default revision."""
        method = self.quantization or "none"
        return {
            "quantization": _QUANTIZATIONS.get(method, method),
            "dtype": (self.dtype or "none").removeprefix("torch."),
            "revision": self.revision or "main",
        }


class _VllmConfig(Struct):
    model_config: _ModelConfig | None = None
    kv_transfer_config: _KvTransfer | None = None
    speculative_config: _Speculation | None = None


class ServerInfo(Struct, frozen=True, kw_only=True):
    """What only an engine in dev mode reports. None: it does not."""

    role: Role | None = None  # None, too: it transfers nothing
    transfers: tuple[Transfer, ...] = ()  # that it can do, and we can speak; empty, too: none
    eagle: bool | None = None  # whether it drops the last block of a hit
    weights: Mapping[str, str] = {}  # which they are, by field; empty: it does not say
    key_head: str | None = None  # [PREFIX@]MODEL of its keys in a pool; None, too: it stores none


class _ServerInfo(Struct):
    vllm_config: _VllmConfig


class _Paused(Struct):
    is_paused: bool


class _Engine(Struct):
    engine_id: Annotated[str, Meta(min_length=1, max_length=256)]


class _Tokenized(Struct):
    tokens: list[Annotated[int, Meta(ge=0, lt=1 << 31)]]


class _Refusal(Struct):
    message: str


class _Refused(Struct):
    error: _Refusal


_decode_models = decoder(_ModelList, "json")
_decode_sources = decoder(dict[str, EventSource], "json")
_decode_version = decoder(_Version, "json")
_decode_paused = decoder(_Paused, "json")
_decode_server_info = decoder(_ServerInfo, "json")
_decode_engines = decoder(dict[int, _Engine], "json")
_decode_tokens = decoder(_Tokenized, "json")
_decode_refused = decoder(_Refused, "json")


def models(body: bytes) -> tuple[ServedModel, ...]:
    """Read a model list.

    Raises:
        ValueError: it is none, or too long.
    """
    found = _decode_models(body).data
    if len(found) > MAX_MODELS:
        raise ValueError(f"{len(found)} models, the limit is {MAX_MODELS}")
    return tuple(
        ServedModel(
            id=entry.id,
            root=entry.root,
            parent=entry.parent,
            max_model_len=in_range(entry.max_model_len, MAX_COUNT),
        )
        for entry in found
    )


def event_sources(body: bytes) -> dict[int, EventSource]:
    """Read each global rank's event source, those that are off included.

    Raises:
        ValueError: it is no such answer; impossible ranks are left out.
    """
    found = [(rank_of(rank), source) for rank, source in _decode_sources(body).items()]
    known = {rank: source for rank, source in found if rank is not None}
    return {rank: known[rank] for rank in sorted(known)[:MAX_RANKS]}


def is_paused(body: bytes) -> bool | None:
    """Read whether the scheduler is paused; None: it does not say."""
    try:
        return _decode_paused(body).is_paused
    except ValueError:
        return None


def version(body: bytes) -> str | None:
    """Read the engine's version; None: it has none."""
    try:
        return _decode_version(body).version
    except ValueError:
        return None


def tokens(body: bytes) -> list[int]:
    """Read the tokens of a prompt.

    Raises:
        ValueError: they are none.
    """
    return _decode_tokens(body).tokens


def refusal(body: bytes) -> str:
    """Read why an engine refused something."""
    try:
        return _decode_refused(body).error.message[:500]
    except ValueError:
        return "no reason given"


def server_info(body: bytes) -> ServerInfo:
    """Read what only a dev-mode `/server_info` shows.

    Raises:
        ValueError: it is no such page.
    """
    found = _decode_server_info(body).vllm_config
    transfer, speculation = found.kv_transfer_config, found.speculative_config
    model = found.model_config
    known = [
        each
        for each in (transfer.connectors if transfer is not None else ())
        if each.kv_connector in TRANSFER_OF_CONNECTOR
    ]
    kind = next((each.kv_role for each in known), transfer.kv_role if transfer else None)
    store = next((c for c in known if TRANSFER_OF_CONNECTOR[c.kv_connector or ""] == "store"), None)
    return ServerInfo(
        role=ROLE_OF_KIND.get(kind or ""),
        transfers=tuple(
            dict.fromkeys(TRANSFER_OF_CONNECTOR[each.kv_connector or ""] for each in known)
        ),
        eagle=speculation is not None
        and speculation.drops_last(has_connector=transfer is not None),
        weights=model.weights if model is not None else {},
        key_head=_key_head(store, model) if store is not None and model is not None else None,
    )


def _key_head(store: _Connector, model: _ModelConfig) -> str:
    """Build the first fields of a store's keys, as router.pool.layouts describes them."""
    name = model.model.rstrip("/").rpartition("/")[2]
    return f"{store.cache_prefix}@{name}" if store.cache_prefix else name


def engine_ids(body: bytes) -> dict[int, str]:
    """Read the engines' names by rank from a MooncakeConnector's bootstrap server.

    Source: vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_utils.py, 0.32.0.

    Raises:
        ValueError: it is no such page.
    """
    engines = _decode_engines(body)
    return {rank: one.engine_id for rank, one in engines.items() if 0 <= rank < MAX_RANKS}
