"""What agents say of their sessions: they end, or a shorter history takes the place of theirs.

An ended session gives its place in the working set back at once, and its sub-agents' sessions do,
too. After a compaction a session has no own tokens there until its next turn. Before one it has
them: the request for a summary has the old history in it. A hook may be wrong,
late or missing: the next turn makes a session live again, and silence ends one as before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Final

from router.api.sessions import engine_name, session_hash
from router.observers.sessions.session_ledger import Session, SessionLedger
from router.observers.sessions.turn_notes import MAX_DIGESTS, Hooked, Over
from router.replicas.fleet import Fleet

logger = logging.getLogger(__name__)

_AT_ONCE: Final = 500  # digests that are made in one turn of the loop: half a millisecond
_NOTE_BYTES: Final = 40


def _ignore(*_: object) -> None:
    """Do nothing: there is no other router."""


class Hooks:
    """Puts hooks into effect, here and at other routers."""

    def __init__(self, ledger: SessionLedger, fleet: Fleet) -> None:
        self.tell: Callable[[Over, int], None] = _ignore
        """Called with what other routers should know, and its size in bytes."""
        self._ledger = ledger
        self._fleet = fleet

    async def apply(
        self, name: str, owners: Iterable[str], what: Hooked, *, tells_unknown: bool = False
    ) -> bool:
        """Apply what becomes of a session; False: it is not known.

        Args:
            name: As its client names it.
            owners: Whose it may be, as `session_hash` has it before a model: "" or `TENANT\\0`.
            what: Becomes of it.
            tells_unknown: Send it to other routers if it is not known here: its last turn may have
                ended there this moment.
        """
        is_known = False
        models = {model.id for replica in self._fleet.members.replicas for model in replica.models}
        conversations = self._fleet.conversations
        at_once = max(1, _AT_ONCE // (len(models) + 1))
        for number, owner in enumerate(owners, start=1):
            if number % at_once == 0:
                await asyncio.sleep(0)
            digests = [session_hash(name, owner + model) for model in models]
            digests = [each for each in digests if conversations.last(each) is not None]
            note = Over(
                conversation=session_hash(name, owner),
                sessions=tuple(digests[:MAX_DIGESTS]),
                what=what,
            )
            is_here = self.receive(note)
            is_known = is_known or is_here
            if is_here or tells_unknown:
                self.tell(note, _NOTE_BYTES + 9 * len(note.sessions))
        return is_known

    def receive(self, note: Over) -> bool:
        """Apply another router's note, or an own one; False: it concerns nothing here."""
        sessions = list(self._ended(note) if note.what == "ended" else self._compacted(note))
        digests = {*note.sessions, *(each for session in sessions for each in session.routing)}
        if not sessions and not digests:
            return False
        conversations = self._fleet.conversations
        for digest in digests if note.what != "compacting" else ():
            if note.what == "ended":
                conversations.finish(digest)
            else:
                conversations.compact(digest)
        name = engine_name(note.conversation)
        logger.info("agent's hook", extra={"what": note.what, "session": name})
        self._fleet.members.changed()
        return True

    def _compacted(self, note: Over) -> Iterable[Session]:
        session = self._ledger.compacted(note.conversation)
        return () if session is None else (session,)

    def _ended(self, note: Over) -> Iterable[Session]:
        """End a session and all that it started, whatever its client said of who started whom."""
        seen, keys = {note.conversation}, [note.conversation]
        for key in keys:  # it grows
            session = self._ledger.ended(key)
            if session is not None:
                yield session
                keys += [child for child in session.children if child not in seen]
                seen.update(session.children)
