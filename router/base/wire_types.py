"""Bounds of what is read of Redis, so that nothing there breaks arithmetic."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Count = Annotated[int, Meta(ge=0, le=1 << 40)]
Seconds = Annotated[float, Meta(ge=0.0, le=1e12)]  # or milliseconds; no NaN is in it
Text = Annotated[str, Meta(max_length=1_024)]
Keys = Annotated[bytes, Meta(max_length=16 * 1024 * 1024)]
