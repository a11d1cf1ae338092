"""What a study found: one JSON file, written after every step."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from loadtest.gpu.run_machine import Hardware
from loadtest.gpu.run_setting import Setting
from loadtest.machine import Machine
from loadtest.studies.grid_run import GridRun

SCHEMA: Final = "warmroute.gpu/1"


class Prefill(Struct, frozen=True, kw_only=True):
    """Prompts of one length that nothing had cached: measured, and as the router predicted."""

    num_tokens: int
    measured_ms: tuple[float, ...]
    predicted_ms: tuple[float, ...]


class HandOver(Struct, frozen=True, kw_only=True):
    """First tokens of a cached conversation, sent as text or as token ids.

    `is_direct`: the replica takes no ids with a chat. Both were sent to it without a router, the
    ids as a completion.
    """

    num_tokens: int
    off_ms: tuple[float, ...]
    on_ms: tuple[float, ...]
    num_handed: int  # of the latter; by the router's count, if there is one
    is_direct: bool = False


class Fetch(Struct, frozen=True, kw_only=True):
    """A prompt computed, and the same read from the replica's CPU tier."""

    num_tokens: int
    num_fetched_tokens: tuple[int, ...]
    computed_ms: tuple[float, ...]
    fetched_ms: tuple[float, ...]


class Found(Struct, frozen=True, kw_only=True):
    """All that is done so far; `notes` say in a line each what is missing, and why."""

    schema: str = SCHEMA
    date: str
    command: str
    machine: Machine
    hardware: Hardware
    setting: Setting
    took_s: float = 0.0
    runs: tuple[GridRun, ...] = ()
    prefills: tuple[Prefill, ...] = ()
    hand_overs: tuple[HandOver, ...] = ()
    fetches: tuple[Fetch, ...] = ()
    notes: tuple[str, ...] = ()
