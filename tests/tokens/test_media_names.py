"""Images get the names that vLLM's own hasher gives them, or none."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.tokens.media_names import MAX_URL_CHARS, MediaItem, name_of

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "media_vectors.json").read_text())
MODEL = VECTORS["model"]
PNG = VECTORS["images"][0]


@pytest.mark.parametrize("image", VECTORS["images"], ids=lambda i: f"{i['form']}-{i['mode']}")
def test_an_image_has_the_engines_name(image: dict[str, Any]) -> None:
    """Of every format and mode it is vLLM's; of what is not certain there is none."""
    url = f"data:image/any;base64,{image['data']}"

    name = name_of(MediaItem(url, None), MODEL)

    assert name == (None if image["form"] == "BMP" else image["identifier"])


def test_a_clients_own_name_is_the_name() -> None:
    """A `uuid` is taken as it is, with an image or without."""
    assert name_of(MediaItem(None, "mine"), MODEL) == "mine"
    assert name_of(MediaItem("http://example.org/a.png", "mine"), MODEL) == "mine"


def test_the_model_is_part_of_the_name() -> None:
    """Two models name the same image differently."""
    item = MediaItem(f"data:image/png;base64,{PNG['data']}", None)

    assert name_of(item, MODEL) != name_of(item, "another")


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
        "data:image/png;base64,",
        "data:image/png;base64," + "A" * MAX_URL_CHARS,
    ],
    ids=lambda url: url[:40],
)
def test_what_is_not_certain_has_no_name(url: str) -> None:
    """Addresses, what the engine refuses, and what is too large."""
    assert name_of(MediaItem(url, None), MODEL) is None


@pytest.mark.hypothesis
@given(
    st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"RIFF0000WEBP", b"GIF89a"]),
    st.binary(max_size=64),
)
def test_any_bytes_have_a_name_or_none(head: bytes, rest: bytes) -> None:
    """Broken pictures raise nothing."""
    url = "data:image/png;base64," + base64.b64encode(head + rest).decode()

    name = name_of(MediaItem(url, None), MODEL)

    assert name is None or len(name) == 64


def test_a_jpeg_of_nothing_but_segments_ends() -> None:
    """Of a hostile one only the first thousand segments are read."""
    data = b"\xff\xd8" + b"\xff\xe0\x00\x02" * 1_000_000

    assert (
        name_of(MediaItem("data:image/jpeg;base64," + base64.b64encode(data).decode(), None), MODEL)
        is None
    )
