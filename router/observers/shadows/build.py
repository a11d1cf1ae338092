"""Builds the shadow policies, if there are any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.registry import create
from router.http.part import ObserverPart
from router.observers.shadows import Shadows
from router.observers.shadows.metrics import ShadowMetrics

if TYPE_CHECKING:
    from router.assembly.router import Router


def build(router: Router) -> ObserverPart:
    """Build the part."""
    config, metrics = router.config.shadow, ShadowMetrics(router.metrics.registry)
    if not config.policies:
        return ObserverPart()
    shadows = Shadows(
        [create(shadow.name, shadow.params) for shadow in config.policies],
        share=config.share,
        metrics=metrics,
    )
    return ObserverPart(observers=[shadows], wrap_record=shadows.put)
