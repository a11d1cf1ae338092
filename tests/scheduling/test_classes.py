"""router.scheduling.order: which class a request is of."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.base.errors import BadRequest
from router.scheduling.order import (
    CLASS_HEADER,
    CLASSES,
    DEADLINE_HEADER,
    class_of,
    deadline_ms_of,
)


@pytest.mark.parametrize(
    ("header", "is_batch", "is_of"),
    [
        (None, False, "interactive"),
        (None, True, "batch"),
        ("batch", False, "batch"),
        ("batch", True, "batch"),
        ("interactive", False, "interactive"),
        ("interactive", True, "batch"),
    ],
)
def test_a_header_can_lower_a_class_only(header: str | None, is_batch: bool, is_of: str) -> None:
    """The class of its caller is the highest that a request can have."""
    headers = {} if header is None else {CLASS_HEADER: header}

    assert class_of(headers, is_batch=is_batch) == is_of


@given(st.text(max_size=30).filter(lambda text: text not in CLASSES))
def test_whatever_is_no_class_is_refused(text: str) -> None:
    """The error names the header and what is allowed, and quotes nothing."""
    with pytest.raises(BadRequest, match="interactive, batch") as caught:
        class_of({CLASS_HEADER: text}, is_batch=False)

    assert caught.value.param == CLASS_HEADER


@given(st.text(max_size=12) | st.integers(-5, 10**8).map(str))
def test_a_deadline_is_a_whole_number_in_its_range(text: str) -> None:
    """Everything else is refused, and the error says the range."""
    is_good = text.isascii() and text.isdigit() and len(text) <= 7 and 1 <= int(text) <= 3_600_000
    if is_good:
        assert deadline_ms_of({DEADLINE_HEADER: text}) == int(text)
        return
    with pytest.raises(BadRequest, match="from 1 to 3600000"):
        deadline_ms_of({DEADLINE_HEADER: text})


def test_no_header_is_no_deadline() -> None:
    """The configuration's default is not read here."""
    assert deadline_ms_of({}) is None
