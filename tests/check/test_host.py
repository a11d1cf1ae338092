"""router.check.host: ports."""

from __future__ import annotations

import socket

from router.check.host import why_not_free


def test_a_free_port_is_left_free() -> None:
    """A taken port is not free, nor is any port of an unknown host."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert why_not_free("127.0.0.1", port) == "Address already in use"
    assert why_not_free("127.0.0.1", port) is None
    assert why_not_free("127.0.0.1", port) is None
    assert (why_not_free("nowhere.invalid", port) or "").startswith("unknown host")
    assert why_not_free("203.0.113.1", port) is not None
    assert why_not_free("::1", port) in (None, "no address of this machine")
