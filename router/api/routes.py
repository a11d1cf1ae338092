"""Which routes the public port serves. An allow-list: engines see no other route.

An engine's port also has routes that control it (sleep, pause, caches, weights, adapters) and
routes that report on it (metrics, docs). Its --api-key protects few of them (vLLM 0.32
serve/middleware/authenticate.py: /v1, /v2, /inference, /cohere). `/tokenizer_info` is not served
either, nor is `…/derender`, whose cost grows with the cube of its input. An operator adds routes
with `forward.routes`. `/health`, `/ping` and `/version` are answered by router.http.pages.

A path is matched as the bytes that came, and forwarded as it was matched. So every other spelling
of a path (//x, /%78, /a/../x, /x;y, \\x) is another path, which is not on the list. A slash at the
end of a known path is removed, because FastAPI would answer 307 with the engine's own address.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Final, Literal
from urllib.parse import parse_qsl

import orjson
from msgspec import Struct

from router.base.errors import MethodNotAllowed, UnknownRoute

_POST: Final = frozenset({"POST"})
_GET: Final = frozenset({"GET", "HEAD"})

# Source: vLLM 0.32.0 and 0.33.0, every api_router.py below vllm/entrypoints. In OpenAI's API, but
# not (yet) in vLLM: audio/speech, input_items, DELETE of a response.
KNOWN: Final[dict[str, frozenset[str]]] = {
    "/v1/models": _GET,
    # generate
    "/v1/chat/completions": _POST,
    "/v1/chat/completions/batch": _POST,
    "/v1/completions": _POST,
    "/v1/responses": _POST,
    "/v1/messages": _POST,
    "/v1/messages/count_tokens": _POST,
    "/v1/systemone": _POST,
    "/v1/decisions": _POST,
    "/cohere/v2/chat": _POST,
    "/inference/v1/generate": _POST,
    "/invocations": _POST,
    "/generative_scoring": _POST,
    # pool
    "/v1/embeddings": _POST,
    "/v2/embed": _POST,
    "/pooling": _POST,
    "/classify": _POST,
    "/score": _POST,
    "/v1/score": _POST,
    "/rerank": _POST,
    "/v1/rerank": _POST,
    "/v2/rerank": _POST,
    # audio
    "/v1/audio/transcriptions": _POST,
    "/v1/audio/translations": _POST,
    "/v1/audio/speech": _POST,
    # tokens
    "/tokenize": _POST,
    "/detokenize": _POST,
    "/v1/chat/completions/render": _POST,
    "/v1/completions/render": _POST,
    "/v1/messages/render": _POST,
    "/v1/responses/render": _POST,
    "/cohere/v2/chat/render": _POST,
}

_OF_RESPONSES: Final = {
    "": frozenset({"GET", "HEAD", "DELETE"}),
    "/cancel": _POST,
    "/input_items": _GET,
}
RESPONSE_PATH: Final = re.compile(r"/v1/responses/([A-Za-z0-9_-]{1,128})(/cancel|/input_items|)")

_STATUS_PHRASES: Final = {404: "Not Found", 405: "Method Not Allowed"}
_MOST_REFUSAL_BYTES: Final = 1024

_UPLOADS: Final = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})

# Source: RFC 3986, `pchar` without ";"; escapes only of what may not stand there as it is, and of
# none of these: what separates (/ \ ; ? #), the escape itself, controls. No space at the end, which
# some readers drop.
_SHOWN: Final = 200  # of what a client has made up
_SEGMENT: Final = re.compile(
    r"(?!\.{1,2}$)(?!.*%20$)"
    r"(?:[A-Za-z0-9._~!$&'()*+,=:@-]"
    r"|%(?:2[02]|3[CEce]|5[BDEbde]|60|7[B-Db-d]|[89A-Fa-f][0-9A-Fa-f]))+"
)
_ABSOLUTE: Final = re.compile(r"https?://[^/?#]*", re.IGNORECASE)
_WORD: Final = re.compile(r"|v[0-9]{1,2}|[a-z._-]{1,24}")
_PATTERN: Final = re.compile(r"(?:(?P<method>[A-Z]+) )?(?P<path>/\S*)")


class Route(Struct, frozen=True):
    """A route that is served: `path` is what is forwarded, `takes` its POSTs' bodies.

    `any`: an operator's route, or no body is expected.
    """

    path: str
    takes: Literal["json", "form", "any"]


class Routes:
    """The routes that are served.

    Args:
        more: `forward.routes`; each must pass `check_pattern`.
        own: Paths whose POSTs the router answers itself.
    """

    def __init__(self, more: Iterable[str] = (), own: Iterable[str] = ()) -> None:
        self._methods: dict[str, set[str] | frozenset[str] | None] = {**KNOWN}  # None: all
        self._prefixes: list[tuple[str, str | None]] = []  # (path, method)
        for pattern in more:
            split = _PATTERN.fullmatch(pattern)
            assert split is not None
            path, method = split["path"], split["method"]
            if path.endswith("/*"):
                self._prefixes.append((path[:-1], method))
            elif method is None:
                self._methods[path] = None
            elif (methods := self._methods.get(path, frozenset())) is not None:
                self._methods[path] = {*methods, method}
        self._methods |= dict.fromkeys(own, _POST)
        self._post = {  # nearly every request is one of these
            path: _route(path)
            for path, methods in self._methods.items()
            if methods is None or "POST" in methods
        }

    def find(self, method: str, raw_path: str) -> Route:
        """Find the route of a request by its path as it came, without the query.

        Raises:
            UnknownRoute, MethodNotAllowed: it is not served.
        """
        route = self._post.get(raw_path) if method == "POST" else None
        return route or self._find(method, raw_path)

    def _find(self, method: str, raw_path: str) -> Route:
        path = raw_path
        if path.endswith("/"):
            bare = path[:-1]
            path = bare if bare in self._methods or RESPONSE_PATH.fullmatch(bare) else path
        methods: set[str] | frozenset[str] | None = frozenset()
        if path in self._methods:
            methods = self._methods[path]
        elif response := RESPONSE_PATH.fullmatch(path):
            methods = _OF_RESPONSES[response[2]]
        # OPTIONS: what is no web page's preflight is the engine's to answer.
        if methods is None or method in methods or (methods and method == "OPTIONS"):
            return _route(path)
        if self._is_below_a_prefix(method, path):
            return Route(path, takes="any")
        if methods:
            allowed = ", ".join(sorted(methods))
            message = f"{path} takes {allowed}, not {method[:20]!a}"
            raise MethodNotAllowed(message, allowed=f"{allowed}, OPTIONS")
        meant = self._meant(method, path)
        hint = f"; did you mean {meant}?" if meant is not None else ""
        raise UnknownRoute(
            f"'{shown(method)}' '{shown(raw_path)}' is not served here{hint}; an operator can add "
            "a route to `forward.routes`, and engines are controlled through the admin API"
        )

    def _meant(self, method: str, path: str) -> str | None:
        """Find the route that is meant: /v1 twice, or left out, or a word mistyped."""
        end = re.sub(r"^/+(?:v1/+)*|/+$", "", path)
        for meant in (f"/v1/{end}", f"/{end}"):
            if meant != path and method in (self._methods.get(meant) or ()):
                return meant
        known = [each for each, methods in self._methods.items() if method in (methods or ())]
        return next(iter(get_close_matches(f"/v1/{end}", known, n=1, cutoff=0.85)), None)

    def _is_below_a_prefix(self, method: str, path: str) -> bool:
        for prefix, wanted in self._prefixes:
            # The prefix alone is not below it: engines may read it without its last slash.
            if path.startswith(prefix) and path != prefix and wanted in (None, method):
                return is_canonical(path)
        return False


def path_of(target: str) -> str:
    """Return the path of a request's target as it came; a whole URL is one, too (RFC 9112)."""
    path = target.partition("?")[0]
    return path if path.startswith("/") else _ABSOLUTE.sub("", path) or "/"


def shown(text: str) -> str:
    """Write a method or a path that a client has made up: bounded, without control characters."""
    return ascii(text[:_SHOWN])[1:-1]


def loggable(path: str) -> str:
    """Write a path for the log: what may be a name, a key or a text in it becomes `*`."""
    segments = shown(path).split("/")
    return "/".join(part if _WORD.fullmatch(part) else "*" for part in segments)


def _route(path: str) -> Route:
    if path in _UPLOADS:
        return Route(path, takes="form")
    return Route(path, takes="json" if path in KNOWN else "any")


def is_canonical(path: str) -> bool:
    """Return whether a path means the same to every reader; a slash may end it."""
    segments = path.split("/")
    if len(segments) > 2 and not segments[-1]:
        del segments[-1]
    return (
        len(segments) > 1
        and not segments[0]
        and all(_SEGMENT.fullmatch(segment) for segment in segments[1:])
    )


def check_pattern(pattern: str) -> str | None:
    """Return what is wrong with an entry of `forward.routes`; None: nothing."""
    split = _PATTERN.fullmatch(pattern)
    path = split["path"] if split is not None else ""
    prefix = path[:-1] if path.endswith("/*") else path
    if "*" not in prefix and (path == "/*" or is_canonical(prefix)):
        return None
    return (
        f"{pattern!r} is no route; write /path, /prefix/* or METHOD /path, without escapes that "
        "need not be, '//', '.', '..' and ';'"
    )


def engine_route(method: str, path: str) -> str | None:
    """Name a route as engines have it or not. None: it is an operator's.

    Those may be another server's, which may say the same of a thing that it does not have.
    """
    found = RESPONSE_PATH.fullmatch(path)
    if found is not None:
        return f"{method} /v1/responses/ID{found[2]}"
    return f"{method} {path}" if path in KNOWN else None


def lacks_route(status: int, body: bytes) -> bool:
    """Return whether an answer says that its server has no such route, or not for this method.

    A model or a response that does not exist has another text. Source: starlette's and FastAPI's
    own errors; vLLM has written them as its own, too (`error.message`, in old releases `message`).
    """
    phrase = _STATUS_PHRASES.get(status)
    if phrase is None or len(body) > _MOST_REFUSAL_BYTES:
        return False
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.strip() == phrase.encode()
    if not isinstance(value, dict):
        return False
    error = value.get("error")
    told = error if isinstance(error, dict) else value
    return phrase in (value.get("detail"), told.get("message"))


_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})  # Source: RFC 9110 section 9.2.1

# Source: vLLM 0.32 entrypoints/*/api_router.py, routes that compute and keep nothing.
_COMPUTING: Final = frozenset(
    {
        "/classify",
        "/cohere/v2/chat",
        "/detokenize",
        "/generative_scoring",
        "/inference/v1/generate",
        "/invocations",
        "/pooling",
        "/rerank",
        "/score",
        "/tokenize",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/chat/completions/derender",
        "/v1/chat/completions/render",
        "/v1/completions",
        "/v1/completions/derender",
        "/v1/completions/render",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/messages/render",
        "/v1/rerank",
        "/v1/responses",
        "/v1/responses/render",
        "/v1/score",
        "/v2/embed",
        "/v2/rerank",
    }
)


def has_side_effects(method: str, path: str, body: Mapping[str, Any] | None) -> bool:
    """Return whether sending the request twice may not be the same as sending it once.

    Inference that keeps nothing gives the same answer, however often it is asked. Everything else
    may change something (files, batches, adapters, stored responses), and a connection that broke
    does not show whether it did.

    A response that is computed in the background, or that was asked to be stored, stays where it
    was computed.
    """
    if method in _SAFE_METHODS:
        return False
    if method != "POST" or path.rstrip("/") not in _COMPUTING:
        return True
    if path.rstrip("/") == "/v1/responses" and body is not None:
        return body.get("background") is True or body.get("store") is True
    return False


_ADAPTER: Final = "X-Amzn-SageMaker-Adapter-Identifier"
_MAX_QUERY_CHARS: Final = 4_096


def named_model(
    path: str,
    query: str,
    headers: Mapping[str, str],
    *,
    form_model: str | None,
    view: Mapping[str, Any] | None,
    reads_query: bool,
) -> str | None:
    """Find the model that a request names; None: it names none, or not clearly.

    JSON has a `model`, a form a `model` part. On /invocations SageMaker's header goes before the
    body. Routes that an operator added may have `?model=`: OpenAI's realtime calls.

    Source: vLLM 0.32 entrypoints; model_hosting_container_standards/sagemaker/lora.

    Args:
        path, query: Its target.
        headers: By any spelling.
        form_model: Named by the body, which is a form.
        view: The body decoded; None: it is no JSON object.
        reads_query: Whether the route may take it from there.
    """
    if path == "/invocations" and (adapter := headers.get(_ADAPTER)):
        return adapter
    model = view.get("model") if view is not None else form_model
    if model is None and reads_query and "model=" in query and len(query) <= _MAX_QUERY_CHARS:
        model = dict(parse_qsl(query)).get("model")
    return model if isinstance(model, str) and model else None
