"""One look for all pictures."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from loadtest.pictures.look import draw, looks
from policies import POLICIES


def _plot(figure: Any) -> None:
    figure.subplots().plot([1, 2], [3, 4])


def test_a_picture_is_svg_and_the_same_every_time() -> None:
    """Same figures, same bytes: a report made again is the same report."""
    svg = draw(_plot)

    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert draw(_plot) == svg


def test_no_two_arms_look_alike() -> None:
    """However many there are: first colours, then strokes."""
    labels = [*POLICIES, *(f"http://router-{i}" for i in range(8))]

    found = looks(labels)

    assert list(found) == labels
    assert len({(look.colour, str(look.stroke)) for look in found.values()}) == len(labels)


def test_a_policy_keeps_its_colour() -> None:
    """Whatever it is compared with."""
    assert looks(["kv_aware"])["kv_aware"] == looks(["other", "kv_aware"])["kv_aware"]
    assert looks(["round_robin"])["round_robin"].ink == "#636363"
