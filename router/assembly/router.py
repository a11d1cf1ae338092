"""A whole router: its parts, and the story of a request that uses them."""

from __future__ import annotations

from typing import TypeVar

from router.assembly.observers import add_observers
from router.assembly.parts import Parts
from router.assembly.read_files import ReadFiles
from router.assembly.story import build_story
from router.config import Config
from router.config.secrets import read_secret
from router.http.guard import Guard
from router.http.part import ObserverPart
from router.http.server import Listener
from router.scheduling.waiting import DEFAULT_RULES, QueueRules

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
        super().__init__(config, redis_password=redis_password, peer_name=peer_name)
        admin = config.admin
        self.guard = Guard(read_secret(admin.token_file, "admin.token_file"), admin.hosts)
        self.story = build_story(self, queue_rules)
        self.observers: dict[str, ObserverPart] = {}
        add_observers(self)
        self.read_files = ReadFiles(self)
        self.listeners: tuple[Listener, ...] = ()  # the public port's and the admin port's

    def observer(self, kind: type[_O]) -> _O | None:
        """Return the observer of a class; None: there is none."""
        every = (each for part in self.observers.values() for each in part.observers)
        return next((each for each in every if isinstance(each, kind)), None)
