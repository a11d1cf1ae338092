"""Images get the names that vLLM's own hasher gives them, or none."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.releases import V0_33
from router.tokens.media_names import MAX_URL_CHARS, MediaItem, MediaKind, data_of, name_of

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "media_vectors.json").read_text())
MODEL = VECTORS["model"]
PNG = VECTORS["images"][0]


def named(data: bytes, kind: MediaKind = "image", model: str = MODEL) -> str | None:
    return name_of(MediaItem("data:", None, kind), data, model)


NAMED_BY_0_33 = {"tRNS": "01d8aa43d3662cc736635f4e3bbed30735a26eff4654b491ab1e72f74b3528a2"}
"""Names that differ there: recorded by its own hasher, as the vectors are."""


@pytest.mark.parametrize("image", VECTORS["images"], ids=lambda i: f"{i['form']}-{i['mode']}")
def test_images_are_named_as_by_0_33(image: dict[str, Any]) -> None:
    """A picture with a transparent colour is converted there; all others have their names."""
    item = MediaItem("data:", None)
    data = base64.b64decode(image["data"])

    name = name_of(item, data, VECTORS["model"], V0_33)

    named = NAMED_BY_0_33.get(image["mode"], image["identifier"])
    assert name == (None if image["form"] == "BMP" else named)


@pytest.mark.parametrize("image", VECTORS["images"], ids=lambda i: f"{i['form']}-{i['mode']}")
def test_an_image_has_the_engines_name(image: dict[str, Any]) -> None:
    """Of every format and mode it is vLLM's; of what is not certain there is none."""
    data = data_of(f"data:image/any;base64,{image['data']}")
    assert data is not None

    name = named(data)

    assert name == (None if image["form"] == "BMP" else image["identifier"])


def test_a_clients_own_name_is_the_name() -> None:
    """A `uuid` is taken as it is, whatever comes with it."""
    for kind in ("image", "video"):
        assert name_of(MediaItem("data:", "mine", kind), b"", MODEL) == "mine"


def test_the_model_is_part_of_the_name() -> None:
    """Two models name the same image differently."""
    data = base64.b64decode(PNG["data"])

    assert named(data) != named(data, model="another")


@pytest.mark.parametrize(
    "url",
    [
        "http://example.org/a.png",
        "file:///etc/passwd",
        "data:image/png;base64",
        f"data:image/png,{PNG['data']}",
        f"data:image/png;base64;x=1,{PNG['data']}",
        f"data:image/png;base64,{PNG['data']}\n",
        "data:image/png;base64,%%%",
        "data:image/png;base64,ü",
        "data:image/png;base64," + "A" * MAX_URL_CHARS,
    ],
    ids=lambda url: url[:40],
)
def test_what_is_not_certain_has_no_bytes(url: str) -> None:
    """Addresses, what the engine refuses, and what is too large."""
    assert data_of(url) is None


@pytest.mark.hypothesis
@given(
    st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF0000WEBP", b"GIF89a"]),
    st.binary(max_size=64),
    st.sampled_from(["image", "video"]),
)
def test_any_bytes_have_a_name_or_none(head: bytes, rest: bytes, kind: MediaKind) -> None:
    """Broken pictures raise nothing."""
    name = named(head + rest, kind)

    assert name is None or len(name) == 64


def test_what_is_nothing_but_segments_ends() -> None:
    """Of a hostile one only the first are read."""
    data = b"\xff\xd8" + b"\xff\xe0\x00\x02" * 1_000_000

    assert named(data) is None
