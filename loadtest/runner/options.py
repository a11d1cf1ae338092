"""Options of a replay, beside the workload and the target."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

Loop = Literal["open", "closed"]
Api = Literal["auto", "completions", "chat"]


class ReplayError(ValueError):
    """What was asked for cannot be done; nothing was sent, and the message says what to do."""


class ReplayOptions(Struct, frozen=True, kw_only=True):
    """How to send a workload. Times in seconds.

    `rate` stretches the arrivals to so many requests a second, in the open loop. `api` auto: chat
    for turns that have messages, completions for the others.
    """

    label: str = ""  # of the run; "": the target
    seed: int = 0
    loop: Loop = "open"
    rate: float | None = None
    concurrency: int | None = None  # closed loop: sessions at once, sub-agents not counted
    api: Api = "auto"
    model: str | None = None  # None: the only one that the target serves
    tokenizer: str | None = None  # the model's, for words (api chat); None: the bundled one's
    salt: str = ""  # makes prompts that no cache has seen
    max_tokens: int | None = None  # at most so many a reply; None: as the workload says
    ignore_eos: bool = True  # replies as long as the workload says, whatever the model says
    extra_body: dict[str, Any] = {}  # into every request
    headers: dict[str, str] = {}  # with every request
    session_header: str | None = None  # carries the session id; None: none is sent
    api_key: str | None = None
    timeout_s: float = 300.0  # longest silence, from sending on
    warm_up_turns: int = 0  # the workload's first turns are sent, but not counted
    stop_after_s: float | None = None  # no turn is sent after that; those in flight are awaited
    settings: dict[str, str | int | float | bool] = {}  # kept with the run, as they are

    def __post_init__(self) -> None:
        for name in ("rate", "stop_after_s", "timeout_s", "concurrency", "max_tokens"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ReplayError(f"{name} must be positive, got {value}")

    def __repr__(self) -> str:
        """Show what was asked for, but neither the key nor the values of headers."""
        shown = {name: getattr(self, name) for name in self.__struct_fields__}
        shown["api_key"] = None if self.api_key is None else "***"
        shown["headers"] = dict.fromkeys(self.headers, "***")
        return f"ReplayOptions({', '.join(f'{k}={v!r}' for k, v in shown.items())})"
