"""router.api.routes and router.api.body: which model a request names.

router.api.apis: which bodies get another model's name, and what of them changes.
"""

from __future__ import annotations

import pytest

from router.api.apis import ModelAliases
from router.api.body import MAX_PARTS, SMALL_FORM_BYTES, model_of_form
from router.api.routes import named_model

TYPE = "multipart/form-data; boundary=b-1"


def part(head: str, content: str) -> str:
    return f"--b-1\r\n{head}\r\n\r\n{content}\r\n"


def field(name: str, content: str) -> str:
    return part(f'Content-Disposition: form-data; name="{name}"', content)


FILE = part(
    'content-disposition: form-data; name="file"; filename="a.mp3"\r\nContent-Type: audio/mpeg',
    "\x00\r\n\r\n--c\r\nmodel",
)


def form(*parts: str) -> bytes:
    return "".join((*parts, "--b-1--\r\n")).encode()


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (form(FILE, field("model", "whisper")), "whisper"),
        (form(field("model", "whisper"), FILE), "whisper"),
        (form(field("model", "a"), field("language", "en"), field("model", "b")), "b"),
        (form(part("Content-Disposition: form-data; name=model", "a")), "a"),
        (
            form(
                part("Content-Disposition: form-data; name=file; filename*=utf-8''a", "x"),
                field("model", "a"),
            ),
            "a",
        ),
        (form(part('Content-Disposition: form-data; filename=";name=b"; name=file', "a")), None),
        (form(FILE), None),
        (form(field("model", "")), None),
        (form(), None),
    ],
)
def test_the_model_of_a_form_is_its_last_part_of_that_name(body: bytes, model: str | None) -> None:
    """Wherever it stands; what a file holds does not count."""
    assert model_of_form(body, TYPE) == model
    assert model_of_form(body, 'Multipart/Form-Data;charset="utf-8"; boundary="b-1"') == model


def test_a_delimiter_is_found_wherever_slices_of_a_large_form_meet() -> None:
    """The file before it is as long as a slice, give or take its length."""
    head = 'Content-Disposition: form-data; name="file"; filename="a"'
    for more in range(-8, 2):
        body = form(part(head, "x" * (SMALL_FORM_BYTES + more)), field("model", "a"))

        assert model_of_form(body, TYPE) == "a"


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (form(field("model", "a")), "multipart/form-data"),
        (form(field("model", "a")), "multipart/form-data; boundary=b-1; boundary=b-2"),
        (form(field("model", "a")), "multipart/form-data; charset=utf-16; boundary=b-1"),
        (b"preamble\r\n" + form(field("model", "a")), TYPE),
        (form(field("model", "a"))[:-8], TYPE),
        (form(field("model", "a"), field("x\\", "1")), TYPE),
        (form(field("model", "a"), part("content-disposition: form-data; name*=x", "1")), TYPE),
        (form(field("model", "a"), part("content-disposition: form-data", "1")), TYPE),
        (form(field("model", "a"), part("X: y", "1")), TYPE),
        (form(field("model", "a"), "--b-1\r\n\r\n1\r\n"), TYPE),
        (form(field("model", "a"), "--b-1 \r\n" + field("x", "1")[7:]), TYPE),
        (form(part('Content-Disposition: form-data; name="model"; filename="a"', "a")), TYPE),
        (form(field("model", "a"), field("model", "m" * 513)), TYPE),
        (form(field("model", "?")).replace(b"?", b"\xff"), TYPE),
        (form(*[field("x", "1")] * MAX_PARTS, field("model", "a")), TYPE),
        (form(part("X: " + "y" * 5_000, "1"), field("model", "a")), TYPE),
    ],
)
def test_a_form_that_readers_may_read_differently_names_no_model(
    body: bytes, content_type: str
) -> None:
    """Whatever it says, it is not guessed."""
    assert model_of_form(body, content_type) is None


def test_what_names_a_model_depends_on_the_route() -> None:
    """The body goes before the query; SageMaker's header before both, on its own route."""
    adapter = {"X-Amzn-SageMaker-Adapter-Identifier": "sql"}

    def named(
        path: str = "/x",
        query: str = "",
        headers: dict[str, str] | None = None,
        form_model: str | None = None,
        view: dict[str, object] | None = None,
        reads_query: bool = True,
    ) -> str | None:
        return named_model(
            path, query, headers or {}, form_model=form_model, view=view, reads_query=reads_query
        )

    assert named(view={"model": "a"}, query="model=b") == "a"
    assert named(query="model=b") == "b"
    assert named(query="x=1&model=org%2Fb") == "org/b"
    assert named(query="model=b", reads_query=False) is None
    assert named(query="model=b", form_model="a") == "a"
    assert named("/invocations", headers=adapter, view={"model": "a"}) == "sql"
    assert named("/score", headers=adapter, view={"model": "a"}) == "a"
    assert named(view={"model": 1}) is None


ALIASES = ModelAliases({"claude-haiku-*": "small", "claude-*": "large", "gpt.4": "large"})


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"claude-haiku-9","n":1}', b'{"model":"small","n":1}'),
        (b'{"n": 1, "model" : "claude-opus-9"}', b'{"model":"large","n": 1}'),
        (b'{"model":"gpt.4"}', b'{"model":"large"}'),
        (b'{"model":"claude-\\nx"}', b'{"model":"large"}'),
        (b'{"model":"a","model":"claude-x"}', b'{"model":"large"}'),
    ],
)
def test_an_alias_becomes_the_served_model(body: bytes, expected: bytes) -> None:
    """The first name that fits counts, and nothing else of the body changes."""
    assert ALIASES.apply(body, ()) == expected


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"gpt-4"}',
        b'{"model":"my-claude-x"}',
        b'{"model":"claude-x","model":"served"}',
        b'{"model":null}',
        b'{"messages":[{"model":"claude-x"}]}',
        b'["claude-x"]',
        b"not json",
        b"",
        None,
    ],
)
def test_other_bodies_stay_as_they_are(body: bytes | None) -> None:
    """Byte for byte the same object, whatever it is."""
    assert ALIASES.apply(body, ()) is body


def test_no_alias_hides_a_model_that_is_served() -> None:
    body = b'{"model":"claude-x"}'

    assert ALIASES.apply(body, {"claude-x"}) is body
    assert ModelAliases({}).apply(body, ()) is body
