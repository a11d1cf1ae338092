"""How a request's body is framed, beyond what the HTTP parser refuses: RFC 9112 section 6.

The parser refuses two lengths, a length beside a transfer coding, and codings that do not end in
`chunked`. What it lets through and another server could read differently is refused here.
"""

from __future__ import annotations

from aiohttp import HttpVersion11, web

from router.errors import BadRequest, ExpectationFailed
from router.http.answers import error_answer


def check_framing(request: web.BaseRequest) -> None:
    """Refuse a transfer coding other than `chunked` alone, or in HTTP/1.0.

    Raises:
        BadRequest: the router does not decode it, and an engine must not be left to guess.
    """
    coding = request.headers.get("Transfer-Encoding")
    if coding is None:
        return
    if coding.strip().lower() != "chunked":
        why = "Transfer-Encoding must be chunked; compress with Content-Encoding"
    elif request.version < HttpVersion11:
        why = "HTTP/1.0 has no Transfer-Encoding"
    else:
        return
    request.protocol.close()  # after the answer: where this request ended is a matter of opinion
    raise BadRequest(why, param="Transfer-Encoding")


def expected(request: web.BaseRequest) -> web.StreamResponse | None:
    """Refuse an `Expect`; `100-continue` is left to the reader of the body: refusals come first."""
    if request.headers["Expect"].lower() == "100-continue":
        return None
    error = ExpectationFailed("Expect must be 100-continue", param="Expect")
    return error_answer(error, request.path)


async def let_send(request: web.BaseRequest) -> None:
    """Ask a client that waits before its body to send it (`Expect: 100-continue`)."""
    if "Expect" in request.headers and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0
