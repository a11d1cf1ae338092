"""Pictures of runs and comparisons, SVG, all of one look.

This package draws figures and computes none. matplotlib is an extra (`plots`) and imported late.
There is no display and no global figure.
"""

from loadtest.pictures.forest import forest
from loadtest.pictures.look import Look, Rounds, draw, looks
from loadtest.pictures.origins import Origin, origin, origins

__all__ = [
    "Look",
    "Origin",
    "Rounds",
    "draw",
    "forest",
    "looks",
    "origin",
    "origins",
]
