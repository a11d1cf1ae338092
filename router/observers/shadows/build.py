"""Builds the shadow policies, if there are any."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.registry import create
from router.http.part import Part
from router.observers.shadows import Shadows

if TYPE_CHECKING:
    from router.assembly.router import Router


def build(router: Router) -> Part:
    """Build the part."""
    config = router.config.shadow
    if not config.policies:
        return Part()
    shadows = Shadows(
        [create(shadow.name, shadow.params) for shadow in config.policies],
        share=config.share,
        metrics=router.metrics,
    )
    return Part(observers=[shadows], wrap_record=shadows.put)
