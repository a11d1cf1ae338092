"""Read: a body as far as routing needs it, and what routing needs of it.

A body is parsed whole if that is quick, except for messages that an earlier body had, too. Else it
is only outlined. Its bytes stay as they came, unless a field has to change: an alias of a model, a
field that only an operator may set, its caller's salt, or the role of a later system message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from msgspec.structs import replace

from router.api.apis import APIS, ModelAliases, Request
from router.api.body import (
    AT_ONCE_MS,
    LARGE_BYTES,
    MOST_MS,
    SMALL_BYTES,
    SMALL_FORM_BYTES,
    Outline,
    Withheld,
    costs_ms,
    is_form,
    make_outline,
    model_of_form,
    why_not_json,
    with_fields,
)
from router.api.digests import parts_of
from router.api.known_messages import MIN_BYTES, KnownMessages
from router.api.later_system import later_system_as_user
from router.api.openai import ChatRequest, CompletionRequest
from router.api.responses import CREATE, is_kept, named_in
from router.api.routes import has_side_effects, named_model
from router.api.sessions import SessionHeaders, session_hash, session_of
from router.base.caller import ANYBODY
from router.base.contracts import NO_EXTRA, ExtraKeys
from router.base.errors import BadRequest, PayloadTooLarge, UnsupportedBody
from router.replicas.fleet import Fleet
from router.request.results import NO_SESSION, Inbound, Read, Whose
from router.scheduling.order import keepalive_s_of
from router.tokens.hand_over import kind_of

_SALT: Final = "cache_salt"
_NO_CACHE: Final = ("/tokenize", "/detokenize", "/count_tokens")
"""Ends of routes that compute nothing, so need no salt."""


class Reader:
    """Reads requests, without holding the event loop for more than 50 ms.

    Args:
        session_headers: Headers that may name a session.
        aliases: Other names of served models; None: there are none.
        later_system_as_user: Whether later system messages are sent as the user's.
        early_stream_s: How often a stream's client gets a keep-alive before the first token, unless
            it asks for another time. None or 0: never.
    """

    __slots__ = (
        "_aliases",
        "_early_stream_s",
        "_fleet",
        "_known",
        "_later_system_as_user",
        "_session_headers",
        "_withheld",
    )

    def __init__(
        self,
        *,
        fleet: Fleet,
        withheld: Withheld,
        session_headers: SessionHeaders,
        aliases: ModelAliases | None,
        early_stream_s: float | None = None,
        later_system_as_user: bool = False,
    ) -> None:
        self._aliases = aliases
        self._early_stream_s = early_stream_s
        self._known = KnownMessages()
        self._later_system_as_user = later_system_as_user
        self._fleet = fleet
        self._withheld = withheld
        self._session_headers = session_headers

    async def read(self, inbound: Inbound, request_id: str) -> Read:
        """Read a request.

        Raises:
            BadRequest: the body has to be a JSON object and is none, or is nested too deep; a
                prompt's body is empty, or a field of it is wrong.
            PayloadTooLarge, Overloaded: as `Outliner.outline`.
            RouterError: as `_salted`.
        """
        body = inbound.body
        if self._aliases is not None:
            body = self._aliases.apply(body, self._fleet.members.served)
        if self._later_system_as_user and body and inbound.api.parse is not None:
            body = later_system_as_user(body)
        named = inbound if body is inbound.body else replace(inbound, body=body)
        parsed, digests = self._parse(named)
        form_model = await _form_model(named) if parsed is None else None
        read = self._understood(named, request_id, parsed, digests, form_model)
        return read if named is inbound else replace(read, received=inbound)

    def _parse(self, inbound: Inbound) -> tuple[dict[str, Any] | Outline | None, Sequence[int]]:
        """Parse a body; also return digests of its leading messages that are known.

        What an engine would read as JSON, but we do not, never gets to it.
        """
        body = inbound.body
        if body is None or (inbound.needs_model and not inbound.needs_json):  # a form
            return None, ()
        known = None
        if len(body) >= MIN_BYTES:
            known = self._known.find(body, inbound.owner)
        if known is not None and (known.num_new_bytes <= SMALL_BYTES or _is_quick(body)):
            parsed = self._known.parse(body, known)
            if parsed is not None:
                return parsed.view, parsed.digests
        if len(body) <= SMALL_BYTES or _is_quick(body):
            return _whole(inbound), ()
        return _outlined(body, needs_json=inbound.needs_json), ()

    def _understood(
        self,
        received: Inbound,
        request_id: str,
        parsed: dict[str, Any] | Outline | None,
        digests: Sequence[int],
        form_model: str | None,
    ) -> Read:
        """Return what routing needs of a parsed body."""
        outline, body = (parsed, parsed.fields) if isinstance(parsed, Outline) else (None, parsed)
        inbound = self._stripped(received, body, outline)
        request, kind = _request(inbound, body, outline), None
        if request is not None:
            model: str | None = self._model_of(request.model)
            streams, salt = request.stream, request.cache_salt or None
            if isinstance(request, ChatRequest) and body is not None and not inbound.api.counts:
                kind = kind_of(inbound.path, request, body)
        else:
            model = named_model(
                inbound.path,
                inbound.target.partition("?")[2],
                inbound.headers,
                form_model=form_model,
                view=body,
                reads_query=not inbound.needs_model,
            )
            streams, salt = body is not None and body.get("stream") is True, None
        if inbound.caller is not ANYBODY:
            inbound, own_salt = _salted(inbound, model, body)
            salt = own_salt or salt
        if model is None and inbound.needs_model:
            model = self._model_of(None) or None
        keepalive_s = None
        if streams and not inbound.api.counts:
            keepalive_s = keepalive_s_of(inbound.headers)
            if keepalive_s is None and inbound.api in APIS.values():
                keepalive_s = self._early_stream_s or None
        is_response = inbound.path.startswith(CREATE)
        return Read(
            inbound=inbound,
            received=received,
            request_id=request_id,
            model=model,
            streams=streams,
            request=request,
            num_prompts=len(request.prompts) if isinstance(request, CompletionRequest) else 1,
            outline=outline,
            kind=kind,
            salt=salt,
            keepalive_s=keepalive_s,
            response_id=named_in(inbound.path, body) if is_response else None,
            is_kept=inbound.path == CREATE and body is not None and is_kept(body),
            whose=self._whose(inbound, model, body, digests if request is not None else None),
            has_side_effects=has_side_effects(inbound.method, inbound.path, body),
        )

    def _stripped(
        self, inbound: Inbound, body: dict[str, Any] | None, outline: Outline | None
    ) -> Inbound:
        """Drop fields that clients may not set.

        Raises:
            BadRequest: the body is only outlined, and has such a field.
        """
        if outline is not None:
            self._withheld.check_outline(outline)
        elif body is not None and inbound.body is not None:
            stripped = self._withheld.strip(inbound.body, body)
            if stripped is not inbound.body:
                return replace(inbound, body=stripped)
        return inbound

    def _whose(
        self,
        inbound: Inbound,
        model: str | None,
        body: dict[str, Any] | None,
        digests: Sequence[int] | None,
    ) -> Whose:
        """Find the session of a request; `digests` of its leading messages, None: no prompt.

        What tells a conversation's turns apart is the same for all models. A client that names no
        session is known by its first message: its system prompt may be another one in each turn.
        """
        session = session_of(inbound.headers, body, self._session_headers, inbound.path)
        if session is None:
            return NO_SESSION
        owner = inbound.caller.owner
        space, above = f"{owner}{model or ''}", session.parent
        parts = key = None
        if digests is not None and not inbound.api.counts:
            parts = parts_of(inbound.path, body, digests) if body is not None else None
            name = session.name
            if not session.is_named and parts is not None and parts.messages:
                name = f"{parts.messages[0]:016x}"
            key = session_hash(name, owner)
        return Whose(
            session_hash=session_hash(session.name, space),
            parent_session_hash=session_hash(above, space) if above is not None else None,
            is_named=session.is_named,
            conversation=key,
            parent=session_hash(above, owner) if above is not None else None,
            parts=parts,
        )

    def _model_of(self, named: str | None) -> str:
        """Find the model of a request that names none: there must be only one.

        An engine takes its first then, whichever other names it has (vLLM 0.32
        openai/models/serving.py, `base_model_paths[0]`).

        Raises:
            BadRequest: there are several to choose from.
        """
        if named:
            return named
        bases = dict.fromkeys(
            each.base_model for each in self._fleet.members.replicas if each.models
        )
        if len(bases) > 1:
            raise BadRequest(f"name a `model`: {', '.join(bases)}", param="model")
        return next(iter(bases), "")


def _request(
    inbound: Inbound, body: Mapping[str, Any] | None, outline: Outline | None
) -> Request | None:
    """Return what decides the prompt. None: the route is only passed through."""
    if outline is not None:
        return inbound.api.outlined(outline)
    return inbound.api.parse(_required(body)) if inbound.api.parse is not None else None


def _salted(
    inbound: Inbound, model: str | None, body: Mapping[str, Any] | None
) -> tuple[Inbound, str | None]:
    """Hold a request to its caller's models, and put the caller's salt into its body.

    The salt is in our own block hashes, too, so predictions stay exact.

    Args:
        inbound: The request.
        model: The model that it names.
        body: As decoded; None: it is no JSON, or there is none.

    Returns:
        The request to forward, and the salt. None: it is not changed.

    Raises:
        UnknownModel, BadRequest: as `Caller.check_model`; what is sent as `cache_salt` is none.
        UnsupportedBody: the body cannot be salted, so the engine's cache would be everybody's.
    """
    caller = inbound.caller
    if not inbound.body:
        return inbound, None
    caller.check_model(model)
    if inbound.path.endswith(_NO_CACHE):
        return inbound, None
    if body is None:
        if caller.salt is None:
            return inbound, None
        raise UnsupportedBody(
            "the body must be a JSON object, because the tenant has its own cache"
        )
    salt = caller.salted(body.get(_SALT))
    if salt is None:
        return inbound, None
    return replace(inbound, body=with_fields(inbound.body, {_SALT: salt})), salt


def extra_keys(fleet: Fleet, model: str, salt: str | None) -> ExtraKeys:
    """Return what besides tokens names a prompt's blocks: salt and adapter."""
    served = fleet.members.served.get(model)
    lora = (model, served.root or "") if served is not None and served.parent else None
    if lora is None and not salt:
        return NO_EXTRA
    return ExtraKeys(lora=lora, cache_salt=salt or None)


async def _form_model(inbound: Inbound) -> str | None:
    """Find the model that a form names; None: it is no form, or names none clearly."""
    content_type = inbound.headers.get("Content-Type", "")
    if not inbound.body or not is_form(content_type):
        return None
    if len(inbound.body) <= SMALL_FORM_BYTES:
        return model_of_form(inbound.body, content_type)
    return await asyncio.to_thread(model_of_form, inbound.body, content_type)


def _is_quick(body: bytes) -> bool:
    return len(body) <= LARGE_BYTES and costs_ms(body) <= AT_ONCE_MS


def _outlined(body: bytes, *, needs_json: bool) -> Outline | None:
    if costs_ms(body) > MOST_MS:
        raise PayloadTooLarge("the body has too many values")
    try:
        return make_outline(body)
    except ValueError as exc:
        if not needs_json:
            return None
        raise BadRequest(why_not_json(str(exc))) from exc


def _whole(inbound: Inbound) -> dict[str, Any] | None:
    assert inbound.body is not None
    try:
        body = orjson.loads(inbound.body)
    except orjson.JSONDecodeError as exc:
        if not inbound.needs_json:
            return None
        raise BadRequest(why_not_json(str(exc))) from exc
    if isinstance(body, dict):
        return body
    if not inbound.needs_json:
        return None
    raise BadRequest("the body must be a JSON object")


def _required(body: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if body is None:
        raise BadRequest("the body is empty; send a JSON object")
    return body
