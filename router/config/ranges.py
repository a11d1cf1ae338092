"""Ranges and defaults that several settings have in common."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

Seconds = Annotated[float, Meta(gt=0)]
Count = Annotated[int, Meta(ge=1)]
Port = Annotated[int, Meta(ge=0, le=65535)]

NEAR_HOSTS: Final = ("loopback", "private", "*", ".svc", ".svc.cluster.local")
"""Hosts where replicas may be unless it is said otherwise: this machine, private networks, a
Kubernetes cluster. Not addresses of the internet."""
