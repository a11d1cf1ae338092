"""Pictures and recorded output of the docs are of today; `python -m tests.pictures` makes them."""

from __future__ import annotations

import pytest
from PIL import Image

from tests.pictures import DEMO, IMAGES, PAGE, RECORDED, demo_output, digest

TAKEN = ["page-dark.png", "page-phone.png", "page.png"]


def test_every_picture_can_be_made_again() -> None:
    """The architecture is drawn by hand."""
    assert sorted(path.name for path in IMAGES.iterdir()) == ["architecture.svg", *TAKEN]


@pytest.mark.parametrize("name", TAKEN)
def test_a_picture_shows_the_page_of_today(name: str) -> None:
    with Image.open(IMAGES / name) as picture:
        assert picture.info["source"] == digest(PAGE.read_bytes()), "run python -m tests.pictures"


def test_the_recorded_demo_is_of_today() -> None:
    """Its short form, which has the same words and takes seconds, prints what it printed then."""
    found = RECORDED.search(DEMO.read_text())

    assert found is not None
    assert found[1] == digest(demo_output("--short").encode()), "run python -m tests.pictures"
