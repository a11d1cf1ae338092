"""Check a base URL before anything is sent, with advice if something is wrong."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import orjson
from msgspec import Struct

from loadtest.runner.exchange import error_text
from loadtest.runner.options import ReplayError

TIMEOUT_S: Final = 10.0
_MAX_SHOWN: Final = 10


class TargetError(ReplayError):
    """The target does not answer, or not as asked."""


class Target(Struct, frozen=True, kw_only=True):
    """A base URL (without `/v1`), and the model to ask it for."""

    url: str
    model: str
    max_model_len: int | None  # None: not reported


def base_url(url: str) -> str:
    """Check a base URL and bring it into one form: without `/v1` and trailing slashes.

    Raises:
        TargetError: it has no scheme, another than http(s), no host, or credentials or a query.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        hint = f"http://{url}" if "://" not in url else "http://HOST:PORT"
        raise TargetError(f"{url!r} is no base URL; write it like {hint}")
    try:
        port = parts.port
    except ValueError as exc:
        raise TargetError(f"{url!r}: {exc}; write it like http://HOST:PORT") from exc
    if parts.username or parts.password:
        raise TargetError("credentials do not belong into the URL: use --api-key-file or --header")
    if parts.query or parts.fragment:
        raise TargetError(f"{url!r} has a query; a base URL ends before it")
    assert port is None or port >= 0
    path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


async def look(
    client: aiohttp.ClientSession, url: str, *, model: str | None, has_key: bool
) -> Target:
    """Ask `/v1/models` once, and choose the model.

    Args:
        client: Sends the key and the headers of the replay.
        url: From `base_url`.
        model: Asked for; None: the only one there is.
        has_key: Whether an API key goes along.

    Raises:
        TargetError: nothing answers, or not as an OpenAI API, or the model is not served.
    """
    asked = f"{url}/v1/models"
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    try:
        async with client.get(asked, timeout=timeout, allow_redirects=False) as response:
            body = await response.read()
            status = response.status
    except TimeoutError as exc:
        raise TargetError(
            f"{url} accepts connections but did not answer {asked} within {TIMEOUT_S:g} s; "
            "is the engine still loading its model?"
        ) from exc
    except (aiohttp.ClientError, OSError) as exc:
        raise TargetError(
            f"nothing answers at {url} ({_why(exc)}); is it running, and is the port the right one?"
        ) from exc
    if status != 200:
        raise TargetError(_refused(asked, status, body, has_key=has_key))
    return _choose(url, _cards(asked, body), model)


def _why(exc: Exception) -> str:
    inner = getattr(exc, "os_error", exc)
    if isinstance(inner, ConnectionRefusedError):
        return "it refused the connection"
    return f"{type(exc).__name__}: {exc}"


def _refused(asked: str, status: int, body: bytes, *, has_key: bool) -> str:
    said = error_text(body) or "nothing more"
    advice = ""
    if status in (401, 403):
        advice = (
            "the API key that was sent is not accepted"
            if has_key
            else "it wants an API key: --api-key-file FILE or OPENAI_API_KEY"
        )
    elif status == 404:
        advice = "is this the base URL of an OpenAI-compatible API?"
    elif status == 503:
        advice = "is a replica of it ready?"
    return f"{asked} answers {status}: {said}" + (f" ({advice})" if advice else "")


def _cards(asked: str, body: bytes) -> dict[str, int | None]:
    """Read the models' names, and the longest sequence of each where it is given."""
    try:
        found: Any = orjson.loads(body)
        cards = {str(card["id"]): card.get("max_model_len") for card in found["data"]}
    except (orjson.JSONDecodeError, LookupError, TypeError, AttributeError) as exc:
        raise TargetError(
            f"{asked} does not answer with a list of models; is this the base URL of an "
            "OpenAI-compatible API?"
        ) from exc
    return {name: length if isinstance(length, int) else None for name, length in cards.items()}


def _choose(url: str, served: dict[str, int | None], model: str | None) -> Target:
    shown = ", ".join(list(served)[:_MAX_SHOWN]) + (", …" if len(served) > _MAX_SHOWN else "")
    if not served:
        raise TargetError(f"{url} serves no model yet")
    if model is None:
        if len(served) > 1:
            raise TargetError(f"{url} serves {shown}: choose one with --model")
        model = next(iter(served))
    if model not in served:
        raise TargetError(f"{url} does not serve {model!r}, but {shown}: see --model")
    return Target(url=url, model=model, max_model_len=served[model])
