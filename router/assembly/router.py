"""A whole router: its parts, and the story of a request that uses them."""

from __future__ import annotations

import random
import time
from typing import TypeVar

from policies.policy import Policy
from policies.registry import create
from router.api.apis import ModelAliases
from router.assembly.cluster import Cluster
from router.assembly.discovery import Discovery
from router.assembly.observers import builders, check_sections, own_observers
from router.assembly.parts import Parts
from router.assembly.read_files import ReadFiles
from router.base.errors import ConfigError
from router.base.loop_turns import Turns
from router.cluster.following import LogTails
from router.config import Config, PolicyConfig
from router.config.secrets import read_secret
from router.discovery.readiness import Readiness
from router.discovery.status import Status
from router.http.admin import Guard
from router.http.part import ObserverPart
from router.http.server import Listener
from router.metrics.families import CANDIDATE, MODEL, POOL, SHARING, SOURCE
from router.pool.pools import PoolStatus
from router.request.match import Matcher
from router.request.observer import Observers
from router.request.place import Place
from router.request.prefill import Bootstraps, Prefill
from router.request.prompt import Ahead, Lookup, Owners, Prompts
from router.request.queue import WaitingRoom
from router.request.read import Reader
from router.request.record import PredictionAudit, Recorder, Settling, TokenAudit
from router.request.retry import Retries, Witness
from router.request.send import Relay, RequestHeaders, Sender
from router.request.story import Steps, Story
from router.request.tokenize import EngineTokenizer, MediaFinder, MediaTokenizer, Tokenizer, Workers
from router.scheduling.waiting import DEFAULT_RULES, QueueRules


def build_story(parts: Router, queue_rules: QueueRules) -> Story:
    """Build the story of requests from its steps.

    Raises:
        ConfigError: the policy or one of its parameters is unknown.
    """
    turns, owners = Turns(), _owners(parts)
    observers = Observers(metrics=parts.metrics)
    place = _place(parts, observers)
    queue = _queue(parts, place, queue_rules)
    witness = Witness(parts.deaths, parts.fleet)
    retries = Retries(
        parts.config.forward,
        fleet=parts.fleet,
        place=place,
        witness=witness,
        metrics=parts.metrics,
    )
    headers = RequestHeaders(parts.engine_key, parts.withheld, observers)
    sender = _sender(parts, headers=headers, retries=retries)
    reader, tokenizer = _reader(parts), _tokenizer(parts)
    settling = Settling()
    story = Story(
        Steps(
            turns=turns,
            reader=reader,
            prompts=Prompts(
                fleet=parts.fleet,
                models=parts.discovery.served_models,
                owners=owners,
                tokenizer=tokenizer,
                ahead=_ahead(parts, turns),
                queue=queue,
            ),
            place=place,
            queue=queue,
            sender=sender,
            prefill=Prefill(
                parts.config.prefill,
                upstream=parts.upstream,
                headers=headers,
                place=place,
                sender=sender,
                retries=retries,
                bootstraps=Bootstraps(parts.engine_api),
                metrics=parts.metrics,
            ),
            relay=Relay(
                witness=witness,
                place=place,
                metrics=parts.metrics,
                observers=observers,
            ),
            recorder=Recorder(
                caches=parts.caches,
                observers=observers,
                settling=settling,
            ),
            owners=owners,
            retries=retries,
            observers=observers,
            settling=settling,
            headers=headers,
        )
    )
    if parts.fetches is not None:
        observers.add(parts.fetches)
    observers.add(
        PredictionAudit(
            caches=parts.caches,
            tokens=_token_audit(parts),
            fetches=parts.fetches,
            metrics=parts.metrics,
        )
    )
    return story


def _token_audit(parts: Router) -> TokenAudit:
    return TokenAudit(
        parts.prompters,
        hand_over=parts.hand_over,
        prove_ratio=parts.config.tokens.prove_ratio,
        encoders=parts.threads.encode,
        metrics=parts.metrics,
    )


def _reader(parts: Router) -> Reader:
    aliases = parts.config.models.aliases
    return Reader(
        fleet=parts.fleet,
        withheld=parts.withheld,
        session_headers=parts.config.session.read,
        aliases=ModelAliases(aliases) if aliases else None,
        early_stream_s=parts.config.forward.early_stream_s,
        later_system_as_user=parts.config.forward.later_system_as_user,
    )


def _ahead(parts: Router, turns: Turns) -> Ahead:
    return Ahead(
        fleet=parts.fleet,
        caches=parts.caches,
        lookup=_lookup(parts),
        encoders=parts.threads.encode,
        turns=turns,
    )


def _place(parts: Router, observers: Observers) -> Place:
    matcher = Matcher(parts.caches, fetches=parts.fetches)
    return Place(
        fleet=parts.fleet,
        matcher=matcher,
        policy=_policy(parts.config.policy),
        seed=random.SystemRandom().getrandbits(63),
        outbox=parts.cluster.outbox,
        metrics=parts.metrics,
        observers=observers,
    )


def _queue(parts: Router, place: Place, rules: QueueRules) -> WaitingRoom:
    config = parts.config
    return WaitingRoom(
        config.queue,
        is_on=config.queue.is_on(config.policy.name),
        fleet=parts.fleet,
        place=place,
        metrics=parts.metrics,
        keeps_alive=config.forward.early_stream_s is None,
        rules=rules,
        elsewhere=parts.cluster.queues,
    )


def _tokenizer(parts: Router) -> Tokenizer:
    config = parts.config.tokens
    engine = EngineTokenizer(
        parts.engine_api,
        parts.fleet,
        timeout_s=config.engine_timeout_s,
    )
    workers = Workers(parts.threads.encode, parts.threads.heavy)
    finder = MediaFinder(engine, parts.threads.encode)
    return Tokenizer(
        prompters=parts.prompters,
        workers=workers,
        engine=engine,
        media=MediaTokenizer(finder, workers, parts.metrics),
        fleet=parts.fleet,
        metrics=parts.metrics,
    )


def _sender(parts: Router, *, headers: RequestHeaders, retries: Retries) -> Sender:
    return Sender(
        parts.upstream,
        models=parts.discovery.served_models,
        sleepers=parts.discovery.sleepers,
        headers=headers,
        retries=retries,
        hand_over=parts.hand_over,
        metrics=parts.metrics,
    )


def _policy(config: PolicyConfig) -> Policy:
    try:
        return create(config.name, config.params)
    except ValueError as exc:
        raise ConfigError(f"policy: {exc}", param="policy.name") from exc


def _owners(parts: Router) -> Owners:
    return Owners(
        parts.responses,
        registry=parts.registry,
        fleet=parts.fleet,
        sharing=parts.cluster.sharing,
        ttl_s=parts.config.session.ttl_s,
        metrics=parts.metrics,
    )


def _lookup(parts: Router) -> Lookup | None:
    """Build what asks Redis itself for matches; None: the local copy is asked."""
    if parts.config.index.mode != "redis":
        return None
    sharing = parts.cluster.sharing
    assert sharing is not None  # the configuration was checked
    return Lookup(
        LogTails(sharing.store, timeout_s=parts.config.redis.lookup_timeout_s),
        link=sharing.link,
        names=parts.cluster.names,
        caches=parts.caches,
        metrics=parts.metrics,
    )


_O = TypeVar("_O")


class Router(Parts):
    """One router process's parts; `router.run` runs them.

    Args:
        redis_password: Of the Redis that is configured; None: it needs none.
        queue_rules: When a prompt may leave the queue, besides what the configuration says.
        peer_name: What other routers call this one, unique to the process; None: a new name where
            there is a Redis, else there are no others.

    Raises:
        ConfigError: a policy or one of its parameters is unknown, a file cannot be used.
    """

    def __init__(
        self,
        config: Config,
        *,
        redis_password: str | None = None,
        peer_name: str | None = None,
        queue_rules: QueueRules = DEFAULT_RULES,
    ) -> None:
        super().__init__(config)
        self.discovery = Discovery(self)
        self.cluster = Cluster(
            self, self.discovery, redis_password=redis_password, peer_name=peer_name
        )
        self._build_status()
        admin = config.admin
        self.guard = Guard(read_secret(admin.token_file, "admin.token_file"), admin.hosts)
        self.story = build_story(self, queue_rules)
        self.observers: dict[str, ObserverPart] = {}
        self._add_observers()
        self.read_files = ReadFiles(
            self, guard=self.guard, store=self.cluster.store, loader=self.discovery.loader
        )
        self.listeners: tuple[Listener, ...] = ()  # the public port's and the admin port's

    def _build_status(self) -> None:
        """Build what describes the rest, for /readyz, /metrics and the admin API."""
        waiting = self.waiting
        self.readiness = Readiness(fleet=self.fleet, prompters=self.prompters, waiting=waiting)
        self.status = Status(
            self.registry,
            fleet=self.fleet,
            caches=self.caches,
            waiting=waiting,
            pools=PoolStatus(self.pools, self.fleet),
            sharing=self.cluster.sharing,
            sources=self.discovery.sources.states,
        )
        status, watch = self.status, self.metrics.watch
        watch(CANDIDATE, lambda: status.candidates().items())
        watch(MODEL, lambda: self.fleet.offers.available(time.monotonic()))
        watch(POOL, lambda: [(each["name"], each) for each in status.pools()])
        watch(SOURCE, lambda: [(each["name"], each) for each in status.sources()])
        if (sharing := self.cluster.sharing) is not None:
            watch(SHARING, lambda: [(None, sharing.state())])

    def _add_observers(self) -> None:
        """Build the parts of all folders, in their order, and add their observers.

        Raises:
            ConfigError: a section is set whose folder is not there, or one of its values is wrong.
        """
        steps = self.story.steps
        for name, build in builders():
            self.observers[name] = part = build(self)
            for observer in part.observers:
                steps.observers.add(observer)
            if part.choose is not None:
                steps.prompts.choose = part.choose
        check_sections(self.observers, self.config)
        for observer in own_observers(self.config.observers):
            steps.observers.add(observer)

    def observer(self, kind: type[_O]) -> _O | None:
        """Return the observer of a class; None: there is none."""
        every = (each for part in self.observers.values() for each in part.observers)
        return next((each for each in every if isinstance(each, kind)), None)
