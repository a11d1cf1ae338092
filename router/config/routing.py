"""Settings of decisions: policy, tokens, sessions, what is tried beside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from router.api.sessions import LATE_NAMES, NAMES, PARENTS, SessionHeaders
from router.config.ranges import Seconds


class PolicyConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[
        str,
        Meta(
            description="routing policy (see `warmroute policies`)",
            extra={"flag": "policy", "metavar": "NAME"},
        ),
    ] = "kv_aware"
    params: Annotated[
        dict[str, Any],
        Meta(
            description="NAME=VALUE, repeatable",
            extra={"flag": "policy-param", "metavar": "NAME=VALUE"},
        ),
    ] = {}


class TokensConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    models: Annotated[
        dict[str, str],
        Meta(
            description="served model -> directory or hub name of its tokenizer, NAME=PATH",
            extra={"flag": "tokens-models", "metavar": "NAME=PATH"},
        ),
    ] = {}
    chat_templates: Annotated[
        dict[str, Path],
        Meta(description="served model -> template file, if engines run with --chat-template"),
    ] = {}
    tokenizer_modes: Annotated[
        dict[str, str],
        Meta(description="served model -> the engine's --tokenizer-mode, if set, NAME=MODE"),
    ] = {}
    chat_template_kwargs: Annotated[
        dict[str, dict[str, Any]],
        Meta(
            description="served model -> the engine's --default-chat-template-kwargs, if set, "
            'NAME={"enable_thinking":false}'
        ),
    ] = {}
    content_formats: Annotated[
        dict[str, Literal["auto", "string", "openai"]],
        Meta(
            description="served model -> the engine's --chat-template-content-format, if set, "
            "NAME=FORMAT"
        ),
    ] = {}
    reasoning_effort_maps: Annotated[
        dict[str, dict[str, str]],
        Meta(
            description="served model -> the engine's --reasoning-effort-map, if set, "
            'NAME={"medium":"low"} (vLLM 0.33 or newer)'
        ),
    ] = {}
    time_zone: Annotated[
        str,
        Meta(
            description="time zone of the engines, as in Europe/Berlin: prompts of gpt-oss and "
            "some chat templates contain the engine's date"
        ),
    ] = "UTC"
    start_dates: Annotated[
        dict[str, str],
        Meta(
            description="served model -> VLLM_SYSTEM_START_DATE of its engines, NAME=YYYY-MM-DD, "
            "for gpt-oss; default: today in tokens.time_zone"
        ),
    ] = {}
    encoder: Annotated[
        Literal["auto", "tokenizers"],
        Meta(
            description="auto: fastokens for each tokenizer for which it is proven exact, else "
            "tokenizers. tokenizers: always tokenizers, which take 10 to 50 times as long",
        ),
    ] = "auto"
    cache_tokens: Annotated[
        int, Meta(ge=0, description="prompt tokens remembered for incremental encoding, per model")
    ] = 20_000_000
    prove_ratio: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="share of requests, and of time, spent on proving tokens exact",
        ),
    ] = 0.01
    hand_over: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="whether engines get the token ids of a long prompt, so that they do not "
            "tokenize it again. auto: if proven exact (docs/concepts/tokens.md). on: at every "
            "replica whose release takes them. off: never"
        ),
    ] = "auto"
    engine_timeout_s: Annotated[
        Seconds, Meta(description="deadline for an engine that tokenizes for the router")
    ] = 2.0


class ModelsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    aliases: Annotated[
        dict[str, Annotated[str, Meta(min_length=1, pattern=r"^[^*]+$")]],
        Meta(
            description="another name that clients may use -> served model, NAME=MODEL; * in NAME "
            "stands for any characters, as in claude-*",
            extra={"flag": "model-alias", "metavar": "NAME=MODEL"},
        ),
    ] = {}


class SessionConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    headers: Annotated[
        tuple[str, ...],
        Meta(
            description="request headers that name a session, before the known ones "
            "(docs/concepts/sessions.md)"
        ),
    ] = ()
    parent_headers: Annotated[
        tuple[str, ...],
        Meta(
            description="request headers that name the session that started this one, before the "
            "known ones"
        ),
    ] = ()
    known_headers: Annotated[
        bool,
        Meta(
            description="whether the known headers of sessions are read. off: only those of "
            "session.headers and session.parent_headers"
        ),
    ] = True
    show_ids: Annotated[
        bool,
        Meta(description="show sessions by their clients' own ids on the admin port"),
    ] = False
    ttl_s: Annotated[Seconds, Meta(description="idle time after which a session is removed")] = (
        3600.0
    )

    @property
    def read(self) -> SessionHeaders:
        """Return all headers that are read, in order."""
        if not self.known_headers:
            return SessionHeaders(self.headers, (), self.parent_headers)
        own = {name.lower() for name in self.headers}
        return SessionHeaders(
            names=(*self.headers, *NAMES),
            late=tuple(name for name in LATE_NAMES if name not in own),
            parents=(*self.parent_headers, *PARENTS),
        )


class IndexConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: Annotated[
        Literal["local", "redis"],
        Meta(
            description="where requests are matched: in the local index, or also in Redis for "
            "replicas whose cache this router does not know completely",
        ),
    ] = "local"


class QueueConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="whether prompts wait in the router until an engine has room for the work "
            "and for the live conversations in its cache (docs/concepts/queue.md). auto: with "
            "policy kv_aware",
            extra={"flag": "queue"},
        ),
    ] = "auto"
    fill: Annotated[
        float,
        Meta(
            ge=0.1,
            le=10,
            description="share of a cache for conversations; the rest is for their growth",
        ),
    ] = 0.8
    max_wait_s: Annotated[
        Seconds,
        Meta(
            description="maximum time that a prompt waits for room; then it is sent for one turn, "
            "whatever the cache holds. Class batch: twice as long"
        ),
    ] = 600.0
    deadline_s: Annotated[
        Seconds | None,
        Meta(
            description="interactive prompts get 429 if their first token is predicted later than "
            "this after arrival. A request's x-warmroute-deadline-ms takes precedence. none: no "
            "limit"
        ),
    ] = None
    tbt_ms: Annotated[
        Annotated[float, Meta(gt=0, le=60_000)] | None,
        Meta(
            description="predicted inter-token latency up to which a prompt is sent. Above it the "
            "prompt waits, and gets 429 after queue.max_wait_s. none: no limit"
        ),
    ] = None

    def is_on(self, policy: str) -> bool:
        """Return whether prompts wait where the router's policy is the one of this name."""
        return self.mode == "on" or (self.mode == "auto" and policy == PolicyConfig().name)


class EarlyConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: Annotated[
        Literal["auto", "off"],
        Meta(
            description="auto: idle replicas compute the known beginning of a conversation's next "
            "prompt, where the chat template drops reasoning from it (docs/guides/agents.md)"
        ),
    ] = "auto"

    @property
    def is_on(self) -> bool:
        """Whether next prompts are computed early."""
        return self.mode == "auto"
