"""Observers of the operator's own."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct


class ObserversConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    load: Annotated[
        tuple[str, ...],
        Meta(
            description="classes that watch requests, as MODULE:CLASS; modules of the current "
            "directory are found, too"
        ),
    ] = ()
