"""Builds the steps of a request."""

from __future__ import annotations

import random
import time
from functools import partial

from policies.policy import Policy
from policies.registry import create
from router.assembly.parts import Parts
from router.config import PolicyConfig
from router.errors import ConfigError, RouterError
from router.replicas.fleet import Fleet
from router.request.admit import Admission
from router.request.bootstraps import Bootstraps
from router.request.decide import Decider
from router.request.engine_tokens import EngineTokenizer
from router.request.forward import Forwarder
from router.request.handing import Handing
from router.request.headers import RequestHeaders
from router.request.lookup import Lookup
from router.request.match import Matcher
from router.request.observe import Observer
from router.request.overdue import Patience
from router.request.owners import Owners
from router.request.pipeline import Pipeline, Steps
from router.request.prefill import Prefill
from router.request.read import Reader
from router.request.relay import Relay
from router.request.retry import Retries
from router.request.token_audit import TokenAudit
from router.request.tokenize import Tokenizer
from router.request.turns import Turns
from router.request.wait import WaitingRoom
from router.request.witness import Witness


def build_pipeline(parts: Parts) -> Pipeline:
    """Put the steps of a request together.

    Raises:
        ConfigError: the policy or one of its parameters is unknown.
    """
    config, metrics, verifier = parts.config, parts.metrics, parts.verifier
    turns = Turns()
    tokenizer = Tokenizer(
        config=config.tokens,
        prompters=parts.prompters,
        encoders=parts.threads.encode,
        heavy=parts.threads.heavy,
        engine=EngineTokenizer(
            parts.engine_api,
            partial(_least_busy, parts.fleet),
            timeout_s=config.tokens.engine_timeout_s,
        ),
        max_tokens=parts.fleet.longest,
        metrics=metrics,
    )
    matcher = Matcher(
        fleet=parts.fleet,
        caches=parts.caches,
        lookup=_lookup(parts),
        pool=verifier,
        encoders=parts.threads.encode,
        first_blocks_tokens=config.policy.first_blocks_tokens,
        turns=turns,
    )
    decider = Decider(
        fleet=parts.fleet,
        matcher=matcher,
        sessions=parts.sessions,
        experiments=parts.experiments,
        policy=_policy(config.policy),
        seed=random.SystemRandom().getrandbits(63),
    )
    admission = Admission(
        fleet=parts.fleet,
        caches=parts.caches,
        sessions=parts.sessions,
        outbox=parts.outbox,
        pool=verifier,
        metrics=metrics,
    )
    room = WaitingRoom(
        config.queue,
        is_on=config.queue.is_on(config.policy.name),
        fleet=parts.fleet,
        decider=decider,
        admission=admission,
        metrics=metrics,
    )
    retries = Retries(
        config.forward,
        fleet=parts.fleet,
        pool=verifier,
        witness=Witness(
            parts.deaths,
            fleet=parts.fleet,
            engine_api=parts.engine_api,
            upstream=parts.upstream,
        ),
        metrics=metrics,
    )
    headers = RequestHeaders(parts.engine_key, parts.withheld)
    forwarder = Forwarder(
        parts.upstream,
        models=parts.served_models,
        sleepers=parts.sleepers,
        headers=headers,
        retries=retries,
        patience=Patience(
            config.forward,
            fleet=parts.fleet,
            decider=decider,
            retries=retries,
            pool=verifier,
            metrics=metrics,
        ),
        handing=Handing(parts.hand_over, max_tokens=parts.fleet.longest, metrics=metrics),
        metrics=metrics,
    )
    steps = Steps(
        turns=turns,
        reader=Reader(
            fleet=parts.fleet,
            withheld=parts.withheld,
            session_headers=config.session.headers,
        ),
        models=parts.served_models,
        owners=_owners(parts),
        tokenizer=tokenizer,
        matcher=matcher,
        verifier=verifier,
        decider=decider,
        room=room,
        admission=admission,
        prefill=Prefill(
            config.prefill,
            upstream=parts.upstream,
            headers=headers,
            decider=decider,
            admission=admission,
            forwarder=forwarder,
            retries=retries,
            fleet=parts.fleet,
            bootstraps=Bootstraps(parts.engine_api),
            pool=verifier,
            metrics=metrics,
        ),
        forwarder=forwarder,
        retries=retries,
        relay=Relay(retries=retries, admission=admission, metrics=metrics),
        observer=Observer(
            metrics=metrics,
            caches=parts.caches,
            token_audit=TokenAudit(
                parts.prompters,
                hand_over=parts.hand_over,
                caches=parts.caches,
                prove_ratio=config.tokens.prove_ratio,
                encoders=parts.threads.encode,
                metrics=metrics,
            ),
            pool=verifier,
            decision_log=parts.decision_log,
            experiments=parts.experiments,
            shadows=parts.shadows,
        ),
    )
    return Pipeline(steps, early_stream_s=config.forward.early_stream_s)


def _policy(config: PolicyConfig) -> Policy:
    try:
        return create(config.name, config.params)
    except ValueError as exc:
        raise ConfigError(f"policy: {exc}", param="policy.name") from exc


def _owners(parts: Parts) -> Owners:
    link = parts.sharing.link if parts.sharing is not None else None
    return Owners(
        parts.responses,
        registry=parts.registry,
        fleet=parts.fleet,
        store=parts.store,
        is_up=lambda: link is not None and link.is_up,
        metrics=parts.metrics,
    )


def _lookup(parts: Parts) -> Lookup | None:
    """Build what asks Redis itself for matches; None: the local copy is asked."""
    if parts.config.index.mode != "redis":
        return None
    assert parts.store is not None  # the configuration was checked
    assert parts.sharing is not None
    link = parts.sharing.link
    return Lookup(
        parts.store,
        names=parts.candidate_names,
        caches=parts.caches,
        is_up=lambda: link.is_up,
        metrics=parts.metrics,
    )


def _least_busy(fleet: Fleet, model: str) -> tuple[str, str] | None:
    """Choose the replica to ask for tokens, name and URL; None: none serves the model."""
    now_s = time.monotonic()
    try:
        candidates = fleet.candidates(model, now_s)
    except RouterError:
        return None
    views = fleet.views(candidates, {}, now_s)
    least = min(zip(views, candidates, strict=True), key=lambda pair: pair[0].num_requests)
    return least[1].replica.name, least[1].replica.url
