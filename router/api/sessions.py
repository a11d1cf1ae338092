"""Whom a request is from: its client, as far as proxies in front are trusted, and its conversation.

A connection's own address cannot be made up; an X-Forwarded-For can. It counts only where the
connection is a trusted proxy's (`forward.trusted_proxies`), and is read from its end: the client is
the last address in it that is no trusted proxy's. Where another one sends it, an
unknown proxy stands in between, and the client cannot be known.

The conversation is the one that its client names, else it is known by its first turn:

    1  headers: those of `session.headers`, then `NAMES`, in order
    2  the body: `session_id`, `prompt_cache_key` (one without a UUID in it may be an application's:
       each first turn under it is a session), `previous_response_id`,
       `metadata.user_id` if it ends in `_session_...` or is JSON with a `session_id`,
       `vllm_xargs.session_id`
    3  the headers `LATE_NAMES`: a gateway may have set them, or have them for something else
    4  the first turn, see below; with any other `metadata.user_id`, which names a person
    5  that `metadata.user_id` by itself

vLLM 0.32 takes a body's `session_id` before the header `X-Session-ID`, and `vllm_xargs` last; here
headers come first, since they are known where a body is not read.

A sub-agent is a session of its own, and its parent's name is known: Claude Code's by
`x-claude-code-agent-id`, Codex's and OpenCode's by their own ids. Nothing of this is proof of
anything: a client can send what it likes. Source: requests of Claude Code 2.1, Codex 0.4x and later
(`thread-id` is a sub-agent's own, `session-id` and `prompt_cache_key` its root's) and OpenCode 1.x.
Headers of Dynamo, SGLang's gateway (SMG), llm-d and AIPerf are those of November 2026.

A conversation's beginning: what all of its requests have in common, as a digest.

That is all messages before the first answer. Of the system's only the first characters count: what
clients write behind them (a date, the state of a repository) may differ from turn to turn. Texts
are cut, so that a request costs some microseconds, however long its messages are.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from typing import Any, Final, NamedTuple

import orjson
import xxhash
from msgspec import Struct
from multidict import CIMultiDict, CIMultiDictProxy

from router.api.anthropic import BILLING_HEADER
from router.api.digests import FIELDS, SYSTEM_ROLES, items_of

_LOOPBACK: Final = ("127.0.0.0/8", "::1/128")
_MOST_HOPS: Final = 32
_SAYS_FOR: Final = ("X-Forwarded-For", "Forwarded", "X-Real-IP")

FORWARDED: Final = frozenset(
    {"x-forwarded-for", "x-forwarded-proto", "x-forwarded-host", "forwarded", "x-real-ip"}
)
"""What a client may claim about itself; an engine reads what `Client.write` puts there."""

_Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Client(Struct, frozen=True):
    """A client. `sees_details`: it may see what the router knows, for instance of caches."""

    address: str
    sees_details: bool
    hops: str  # X-Forwarded-For, for the engine: the client first
    proto: str
    host: str | None

    def write(self, headers: CIMultiDict[str]) -> None:
        """Add what proxies tell an engine about a client."""
        headers["X-Forwarded-For"] = self.hops
        headers["X-Forwarded-Proto"] = self.proto
        if self.host is not None:
            headers["X-Forwarded-Host"] = self.host


class Clients:
    """Finds the clients of requests.

    Args:
        details: `auto` (clients at this machine's loopback or in `trusted`), `always` or `never`.
        trusted: Networks whose clients see as much as those on loopback.
        proxies: Networks of trusted proxies in front.
    """

    def __init__(
        self, *, details: str = "auto", trusted: Iterable[str] = (), proxies: Iterable[str] = ()
    ) -> None:
        self._details = details
        self._trusted = [network(text) for text in (*_LOOPBACK, *trusted)]
        self._proxies = [network(text) for text in proxies]
        self._kind = lru_cache(maxsize=4096)(self._kind_of)

    def find(self, peer: str | None, headers: CIMultiDictProxy[str], scheme: str) -> Client:
        """Find a request's client: `peer` is the connection's address, None: a local socket."""
        address = peer or "unix"
        is_proxy, is_trusted = self._kind(address)
        hops, proto, host = address, scheme, headers.get("Host")
        if is_proxy:
            given = ",".join(headers.getall("X-Forwarded-For", ()))
            if given:
                address = self._client_of(address, given)
                hops = f"{given}, {hops}"
            is_trusted = bool(given) and self._kind(address)[1]
            forwarded = headers.get("X-Forwarded-Proto", "").lower()
            proto = forwarded if forwarded in ("http", "https") else scheme
            host = headers.get("X-Forwarded-Host", host)
        elif is_trusted:
            is_trusted = not [name for name in _SAYS_FOR if name in headers]
        sees_details = self._details == "always" or (self._details == "auto" and is_trusted)
        return Client(address, sees_details, hops, proto, host)

    def _client_of(self, peer: str, given: str) -> str:
        """Read a list of hops from its end, as far as it is trusted."""
        client = peer
        for part in reversed(given.split(",")[-_MOST_HOPS:]):
            address = _address(part.strip())
            if address is None:
                break
            client = address
            if not self._kind(client)[0]:
                break
        return client

    def _kind_of(self, address: str) -> tuple[bool, bool]:
        """Return whether an address is a trusted proxy's, and whether it is a trusted client's."""
        if address == "unix":
            return False, True
        try:
            parsed = ipaddress.ip_address(address.partition("%")[0])
        except ValueError:
            return False, False
        if isinstance(parsed, ipaddress.IPv6Address) and parsed.ipv4_mapped is not None:
            parsed = parsed.ipv4_mapped
        return (
            any(parsed in network for network in self._proxies),
            any(parsed in network for network in self._trusted),
        )


def network(text: str) -> _Network:
    """Read an address or a network in CIDR notation.

    Raises:
        ValueError: it is neither.
    """
    return ipaddress.ip_network(text, strict=False)


def _address(text: str) -> str | None:
    """Read one hop: an address, perhaps with a port; None: it is none."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:
        return None


_SYSTEM_CHARS: Final = 512
_END_CHARS: Final = 512  # of each end of a user's text
_MAX_ITEMS: Final = 32  # messages, parts of one, fields of a part
_MAX_TEXTS: Final = 64


def digest_first_turn(path: str, body: Mapping[str, Any]) -> int | None:
    """Digest all that comes before the first answer; None: there is no user's message in it."""
    items = items_of(path, body)
    if items is None:
        return None
    texts = [_system(text) for text in _texts(body.get(FIELDS[path][1]))]
    has_user = False
    for item in items[:_MAX_ITEMS]:
        role = item.get("role") if type(item) is dict else None
        if role == "user":
            has_user = True
            texts += map(_both_ends, _texts(item.get("content")))
        elif type(role) is str and role in SYSTEM_ROLES:
            texts += map(_system, _texts(item.get("content")))
        else:
            break
        if len(texts) >= _MAX_TEXTS:
            break
    if not has_user:
        return None
    return xxhash.xxh3_64_intdigest("\0".join(texts).encode(errors="surrogatepass"))


def _texts(content: object) -> Iterable[str]:
    """Return a content's texts; of other parts what tells them apart: an image's address, say."""
    if isinstance(content, str):
        return (content,)
    return islice(_all_texts(content), _MAX_TEXTS) if type(content) is list else ()


def _all_texts(parts: list[object]) -> Iterator[str]:
    for part in parts[:_MAX_ITEMS]:
        if isinstance(part, str):
            yield part
        elif type(part) is dict and isinstance(part.get("text"), str):
            yield part["text"]
        elif type(part) is dict:
            for value in islice(part.values(), _MAX_ITEMS):
                inner = islice(value.values(), _MAX_ITEMS) if type(value) is dict else (value,)
                yield from (each for each in inner if isinstance(each, str))


def _system(text: str) -> str:
    if text.startswith(BILLING_HEADER):
        text = text[text.find("\n") + 1 :] if "\n" in text[:_SYSTEM_CHARS] else ""
    return text[:_SYSTEM_CHARS]


def _both_ends(text: str) -> str:
    if len(text) <= 2 * _END_CHARS:
        return text
    return f"{text[:_END_CHARS]}\0{len(text)}\0{text[-_END_CHARS:]}"


_AGENT: Final = "x-claude-code-agent-id"
_PARENT_AGENT: Final = "x-claude-code-parent-agent-id"
NAMES: Final = (
    "x-session-id",
    "x-dynamo-session-id",
    "x-claude-code-session-id",
    "x-session-affinity",
    "x-opencode-session",
    "x-smg-routing-key",
    "thread-id",
    "session-id",
    "session_id",
)
"""Headers that name a session, in order."""

LATE_NAMES: Final = ("x-session-token", "x-correlation-id")
"""Headers that name one if nothing else does, in order."""

PARENTS: Final = (
    "x-parent-session-id",
    "x-dynamo-parent-session-id",
    "x-codex-parent-thread-id",
)
"""Headers that name the session that started this one, in order."""

NAME_CHARS: Final = 16  # of a session's digest
MAX_ID_CHARS: Final = 16_384
"""A longer "session id" is something else."""

_UUID: Final = re.compile(r"[0-9a-fA-F]{8}-?(?:[0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}")
_USER_SESSION: Final = re.compile(r"_session_([^_]+)$")


class SessionIdentity(NamedTuple):
    """A conversation, and the one that started it; None: no other one, as far as its client says.

    is_named: Its client has a name for it; False: it is known by its first turn.
    """

    name: str
    parent: str | None = None
    is_named: bool = True


class SessionHeaders(NamedTuple):
    """The headers that may name a session, the ones asked last, and those of its parent."""

    names: tuple[str, ...] = NAMES
    late: tuple[str, ...] = LATE_NAMES
    parents: tuple[str, ...] = PARENTS


def session_of(
    headers: Mapping[str, str], body: Mapping[str, Any] | None, read: SessionHeaders, path: str
) -> SessionIdentity | None:
    """Find a request's session; `read` has the headers that may name it."""
    name = _first_id(headers, read.names)
    if name is None and body is not None:
        name = _in_body(body)
    if name is None:
        name = _first_id(headers, read.late)
    if name is None:
        turn = _first_turn(body, path) if body is not None else None
        return SessionIdentity(turn, is_named=False) if turn is not None else None
    if agent := _id(headers.get(_AGENT)):
        above = _id(headers.get(_PARENT_AGENT))
        has_parent = above not in (None, agent)
        return SessionIdentity(f"{name}\0{agent}", f"{name}\0{above}" if has_parent else name)
    parent = _first_id(headers, read.parents)
    return SessionIdentity(name, parent if parent != name else None)


def session_hash(session: str, model: str) -> int:
    """Digest a session id (63 bits): what is kept, compared, logged and sent in place of the id."""
    # A header's bytes that are no UTF-8 arrive as surrogates.
    return xxhash.xxh3_64_intdigest(f"{model}\0{session}".encode(errors="surrogatepass")) >> 1


def _first_id(headers: Mapping[str, str], names: Iterable[str]) -> str | None:
    """Return the first header that names a session."""
    for name in names:
        value = headers.get(name)
        if value is not None and _id(value):
            return value
    return None


def engine_name(session_hash: int) -> str:
    """Write a session as engines are sent it, and name it in their events."""
    return f"{session_hash:0{NAME_CHARS}x}"


def _in_body(body: Mapping[str, Any]) -> str | None:
    if name := _id(body.get("session_id")):
        return name
    key = _id(body.get("prompt_cache_key"))
    if key is not None and _UUID.search(key):
        return key
    if name := _id(body.get("previous_response_id")):
        return name
    user = _user(body)
    if user is not None and (name := _session_in(user)):
        return name
    arguments = body.get("vllm_xargs")
    return _id(arguments.get("session_id")) if isinstance(arguments, dict) else None


def _first_turn(body: Mapping[str, Any], path: str) -> str | None:
    owner = _id(body.get("prompt_cache_key")) or _user(body)
    turn = digest_first_turn(path, body)
    return owner if turn is None else f"{owner or ''}\0{turn:016x}"


def _user(body: Mapping[str, Any]) -> str | None:
    metadata = body.get("metadata")
    return _id(metadata.get("user_id")) if isinstance(metadata, dict) else None


def _session_in(user: str) -> str | None:
    """Find the session in Claude Code's `user_id`."""
    if user.startswith("{"):
        try:
            said = orjson.loads(user)
        except ValueError:
            return None
        return _id(said.get("session_id")) if isinstance(said, dict) else None
    found = _USER_SESSION.search(user)
    return found[1] if found else None


def _id(value: object) -> str | None:
    return value if isinstance(value, str) and 0 < len(value) <= MAX_ID_CHARS else None
