"""Settings of decisions: policy, tokens, sessions, what is tried beside."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from router.config.ranges import Count, Seconds
from router.experiments.definition import Experiment


class PolicyConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: Annotated[
        str, Meta(description="routing policy (see `warmroute policies`)", extra={"flag": "policy"})
    ] = "kv_aware"
    params: Annotated[
        dict[str, Any],
        Meta(description="NAME=VALUE, repeatable", extra={"flag": "policy-param"}),
    ] = {}
    first_blocks_tokens: Annotated[
        int, Meta(gt=0, description="prompt tokens that prefix_hash looks at")
    ] = 2048


class TokensConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    models: Annotated[
        dict[str, str],
        Meta(description="served model -> directory or hub name of its tokenizer, NAME=PATH"),
    ] = {}
    chat_templates: Annotated[
        dict[str, Path],
        Meta(description="served model -> template file, if the engine got --chat-template"),
    ] = {}
    tokenizer_modes: Annotated[
        dict[str, str],
        Meta(description="served model -> the engine's --tokenizer-mode, if it got one, NAME=MODE"),
    ] = {}
    chat_template_kwargs: Annotated[
        dict[str, dict[str, Any]],
        Meta(
            description="served model -> the engine's --default-chat-template-kwargs, if it got "
            'any, NAME={"enable_thinking":false}'
        ),
    ] = {}
    content_formats: Annotated[
        dict[str, Literal["auto", "string", "openai"]],
        Meta(
            description="served model -> the engine's --chat-template-content-format, if it got "
            "one, NAME=FORMAT"
        ),
    ] = {}
    reasoning_effort_maps: Annotated[
        dict[str, dict[str, str]],
        Meta(
            description="served model -> the engine's --reasoning-effort-map, if it got one, "
            'NAME={"medium":"low"} (vLLM 0.33 or newer)'
        ),
    ] = {}
    start_dates: Annotated[
        dict[str, str],
        Meta(
            description="served model -> VLLM_SYSTEM_START_DATE of its engines, NAME=YYYY-MM-DD; "
            "for gpt-oss; default: found out"
        ),
    ] = {}
    encoder: Annotated[
        Literal["auto", "tokenizers"],
        Meta(
            description="auto: fastokens for each tokenizer that it is proven exact for, else "
            "tokenizers; tokenizers: always that, which takes 10 to 50 times as long",
        ),
    ] = "auto"
    cache_tokens: Annotated[
        int, Meta(ge=0, description="prompt tokens remembered for incremental encoding, per model")
    ] = 20_000_000
    inline_chars: Annotated[
        int, Meta(ge=0, description="encodes with more new text than this leave the event loop")
    ] = 32_768
    prove_ratio: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="share of requests, and of the time, spent on proving tokens exact",
        ),
    ] = 0.01
    hand_over: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="whether engines get a long prompt's token ids with it, so that they need "
            "not tokenize it again: auto: where that is proven (docs/concepts/tokens.md); on: at "
            "every replica that takes them; off: never"
        ),
    ] = "auto"
    engine_timeout_s: Annotated[
        Seconds, Meta(description="deadline for an engine that tokenizes for us")
    ] = 2.0


class SessionConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    headers: Annotated[
        tuple[str, ...], Meta(description="request headers that may carry a session id, in order")
    ] = (
        "x-session-id",
        "x-claude-code-session-id",
        "x-session-affinity",
        "x-opencode-session",
        "thread-id",
        "session-id",
        "session_id",
    )
    ttl_s: Annotated[Seconds, Meta(description="a session is forgotten after this silence")] = (
        3600.0
    )
    max_sessions: Annotated[int, Meta(gt=0, description="sessions remembered")] = 100_000


class IndexConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: Annotated[
        Literal["local", "redis"],
        Meta(
            description="where requests are matched: in the local copy, or in Redis itself",
        ),
    ] = "local"


class QueueConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    mode: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description="whether prompts wait in the router until an engine has room for them: "
            "for work, and for the conversations that live in its cache (docs/concepts/queue.md); "
            "auto: with policy kv_aware",
            extra={"flag": "queue"},
        ),
    ] = "auto"
    window: Annotated[
        int, Meta(ge=0, description="prompts that an engine has ready beside the one it computes")
    ] = 1
    ready_ms: Annotated[
        float,
        Meta(
            ge=0,
            le=60_000,
            description="milliseconds of work up to which an engine gets more prompts than that: "
            "it computes short ones several at a time",
        ),
    ] = 300.0
    fill: Annotated[
        float,
        Meta(
            ge=0.1,
            le=10,
            description="share of a cache that may be taken by conversations that are alive",
        ),
    ] = 0.9
    patience: Annotated[
        float,
        Meta(
            ge=0,
            description="idle time of an engine after which a prompt goes whose conversation does "
            "not fit, in times its price: what it takes to compute, for each prompt that waits for "
            "the engine, times the cube of how scarce compute is",
        ),
    ] = 0.5
    max_wait_s: Annotated[
        Seconds, Meta(description="after this wait a prompt goes though its conversation fits not")
    ] = 300.0
    batch_max_wait_s: Annotated[
        Seconds,
        Meta(
            description="the same of a prompt of class batch; until then it goes behind all "
            "interactive ones, afterwards before"
        ),
    ] = 600.0
    quantum_s: Annotated[
        Seconds,
        Meta(
            description="compute by which tenants that wait take turns, times their weight: one "
            "that has had so much goes behind the others until they had theirs"
        ),
    ] = 5.0
    deadline_s: Annotated[
        Seconds | None,
        Meta(
            description="interactive prompts whose first token is predicted to come later than "
            "this after their arrival are answered 429; a request's own x-warmroute-deadline-ms "
            "goes before; none: they wait as long as it takes"
        ),
    ] = None
    batch_deadline_s: Annotated[Seconds | None, Meta(description="the same for class batch")] = None
    tbt_ms: Annotated[
        Annotated[float, Meta(gt=0, le=60_000)] | None,
        Meta(
            description="a prompt waits while the tokens of its answer are predicted to be "
            "further apart than this, and is answered 429 where it would for longer than "
            "queue.max_wait_s (batch: queue.batch_max_wait_s) or its deadline; none: they may be "
            "as far apart as they are"
        ),
    ] = None
    max_requests: Annotated[
        Count, Meta(description="prompts that may wait; further ones are answered 429")
    ] = 10_000

    def is_on(self, policy: str) -> bool:
        """Return whether prompts wait where the router's policy is the one of this name."""
        return self.mode == "on" or (self.mode == "auto" and policy == PolicyConfig().name)


class ShadowPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy that is asked, but not followed."""

    name: str
    params: dict[str, Any] = {}


class ShadowConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    policies: Annotated[
        tuple[ShadowPolicy, ...],
        Meta(
            max_length=8,
            description="policies to put every decision to as well, without following them: "
            "NAME or NAME:PARAM=VALUE[:PARAM=VALUE…]",
            extra={"flag": "shadow"},
        ),
    ] = ()
    share: Annotated[float, Meta(ge=0, le=1, description="share of decisions put to them")] = 1.0


class ExperimentConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    definitions: Annotated[
        tuple[Experiment, ...],
        Meta(
            description="experiments on live traffic: mappings, or YAML files of one each",
            extra={"flag": "experiment"},
        ),
    ] = ()
