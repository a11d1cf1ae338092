"""Pictures of runs and comparisons, SVG, all of one look.

What must live here: how figures are drawn. What must not: how they are come by. matplotlib is an
extra (`plots`), imported late; there is no display and no global figure.
"""

from loadtest.pictures.first_tokens import first_tokens
from loadtest.pictures.forest import forest
from loadtest.pictures.look import Look, Rounds, draw, looks
from loadtest.pictures.origins import Origin, origin, origins

__all__ = [
    "Look",
    "Origin",
    "Rounds",
    "draw",
    "first_tokens",
    "forest",
    "looks",
    "origin",
    "origins",
]
