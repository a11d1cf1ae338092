"""Which replica issued a response: the most recently used ones.

An engine keeps the responses that it issued to itself, so a request for one by its id has to go to
that engine. A digest of the id and its owner is kept, with the replica's identity among routers.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from itertools import islice
from typing import NewType

from router.base.bounded import Bounded

ResponseKey = NewType("ResponseKey", str)


def response_key(response_id: str, owner: str) -> ResponseKey:
    """Digest an id; a response of another client with the same id has another key."""
    text = f"{owner}\0{response_id}".encode(errors="surrogatepass")
    return ResponseKey(blake2b(text, digest_size=12).hexdigest())


class ResponseOwners:
    """At most `max_responses`; the least recently used one is dropped."""

    __slots__ = ("_identities", "_saved", "_unsaved")

    def __init__(self, *, max_responses: int = 100_000) -> None:
        self._identities: Bounded[ResponseKey, str] = Bounded(max_responses)
        self._unsaved: Bounded[ResponseKey, str] = Bounded(max_responses)
        self._saved: Bounded[ResponseKey, str] = Bounded(max_responses)  # of those noted here

    def __len__(self) -> int:
        return len(self._identities)

    def get(self, key: ResponseKey) -> str | None:
        """Find the identity of the replica that issued a response; None: not known here."""
        return self._identities.use(key)

    def note(self, key: ResponseKey, identity: str) -> None:
        """Record a response that was issued now; other routers have to know it."""
        self.learn(key, identity)
        self._unsaved.put(key, identity)

    def learn(self, key: ResponseKey, identity: str) -> None:
        """Record a response that another router noted."""
        self._identities.put(key, identity)

    def unsaved(self, max_responses: int = 500) -> dict[ResponseKey, str]:
        """List what other routers do not know yet, oldest first."""
        return dict(islice(self._unsaved.items(), max_responses))

    def saved(self, owners: Mapping[ResponseKey, str]) -> None:
        """Record that other routers can know these now."""
        for key, identity in owners.items():
            if self._unsaved.pop(key, None) is not None:
                self._saved.put(key, identity)

    def lost(self) -> None:
        """Record that Redis may have lost what was saved: all that was noted here is unsaved."""
        for key, identity in self._unsaved.items():
            self._saved.put(key, identity)
        self._unsaved, self._saved = self._saved, self._unsaved
        self._saved.clear()
