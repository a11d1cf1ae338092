"""Work in flight at one candidate: what was sent there, and how much of it is still ahead.

Leases of other routers are booked like our own, in the order in which their notes come. So every
router's ledger is nearly the ledger of a single router.

What must live here: leases, their sums, the predicted queue, each lease's part of the engine's
time. What must not: health, what is cached. Every operation is O(1), since all candidates are asked
before every decision. Only `num_timely` is O(waiting); the queue alone asks it.

The model of an engine: prefills are computed in the order of their arrival. The oldest waiting
lease, the *head*, is being computed since it was sent, or since the previous head was done. Sums
are kept in work (tokens, pairs), not in ms, so that a newly learned cost model counts at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from msgspec import Struct, field
from msgspec.structs import replace

from policies.view import CandidateId, CostModel
from router.base.bounded import RecentShare
from router.replicas.cost_fit import Work, mtoken2

_LATE_RATIO = 0.1
"""A head that should be done keeps a tenth of its work, or of the time that it already took. So the
longer an engine hangs, the longer its queue."""

_LOST_RATIO, _LOST_S = 4.0, 30.0
"""A first token is lost if it takes 4 times the prediction plus 30 s: the engine hangs, or the
request waits for something else."""

BUSY_S = 60.0  # time constant of `busy`
_PACE_DECAY = 0.95  # half of the weight of the pace lies on the last 14 first tokens


class Foreign(Struct, frozen=True, kw_only=True, gc=False):
    """Load of one candidate beyond the ledger: of direct clients, of routers without Redis."""

    num_requests: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0
    until_s: float = 0.0  # the reading is too old from then on


NO_FOREIGN = Foreign()


class Booking(Struct, frozen=True, kw_only=True, gc=False):
    """What a request adds to a candidate's load.

    `streams`: its first token will be seen. Otherwise the ledger presumes the first token when it
    is due, so that decoding does not count as a queue.
    """

    num_uncached_tokens: int  # prompt tokens the candidate must compute, of all prompts
    num_cached_tokens: int  # the prompt's other tokens, the fetched ones included
    num_fetched_tokens: int = 0  # of these, tokens read from the cpu tier or the pool
    is_from_pool: bool = False  # they are read from the pool
    num_disk_tokens: int = 0  # of these, so many from SSD
    streams: bool = True
    is_ours: bool = True  # False: another router sent it
    session_hash: int | None = None  # of its conversation; None: not known
    is_batch: bool = False  # its class
    num_prompts: int = 1  # of one request; the engine computes each by itself
    is_visit: bool = False  # its conversation was sent without room

    @property
    def num_tokens(self) -> int:
        """Count the prompt's tokens."""
        return self.num_uncached_tokens + self.num_cached_tokens

    @property
    def num_mtoken2(self) -> float:
        """Count (token, context) pairs in millions; a prompt attends to itself alone."""
        num_each = self.num_uncached_tokens // self.num_prompts
        return self.num_prompts * mtoken2(num_each, self.num_cached_tokens)

    def occupies_ms(self, model: CostModel) -> float:
        """Predict the engine's time for it: to compute its prompts, and to read tokens."""
        return (
            model.ms_per_token * self.num_uncached_tokens
            + model.ms_per_mtoken2 * self.num_mtoken2
            + model.fetch_ms(
                self.num_fetched_tokens,
                from_pool=self.is_from_pool,
                num_on_disk=self.num_disk_tokens,
            )
        )

    def sent(self, num_gpu_tokens: int) -> Booking:
        """Return it for a prompt that another replica has computed and sends.

        All tokens are read but the last, and but the `num_gpu_tokens` that are there. Source: vLLM
        0.32.0, Scheduler._update_waiting_for_remote_kv.
        """
        num_cached_tokens = max(self.num_uncached_tokens + self.num_cached_tokens - 1, 0)
        return replace(
            self,
            num_uncached_tokens=1,
            num_cached_tokens=num_cached_tokens,
            num_fetched_tokens=max(num_cached_tokens - num_gpu_tokens, 0),
            is_from_pool=True,
            num_disk_tokens=0,
        )


class Spent(Struct, gc=False):
    """What one lease takes of its engine's time, in seconds; known with its end.

    prompt_s: Time that its prompt may have taken at most; see `Ledger._prompt_s`.
    answer_s: Its share of the time of answers; see `Ledger._divide`.
    """

    prompt_s: float = 0.0
    answer_s: float = 0.0


class Lease(Struct, frozen=True, kw_only=True, gc=False):
    """One request at one candidate, to be given back with `end`."""

    number: int
    candidate: CandidateId
    booking: Booking
    begun_s: float  # another router's: when its note came
    num_mtoken2: float  # own (token, context) pairs in millions
    work: Work  # everything in front of its first token, own work included
    predicted_ms: float  # first-token time, as predicted at dispatch
    occupies_s: float = 0.0  # predicted time of the engine for its prompt: compute and reads
    spent: Spent = field(default_factory=Spent)


class Ledger:
    """Leases of one candidate."""

    __slots__ = (
        "_answer_s",
        "_booked_s",
        "_computed_s",
        "_decoding",
        "_divided_s",
        "_head",
        "_head_s",
        "_mtoken2",
        "_pace_ms",
        "_pace_s",
        "_pace_tokens",
        "_prompts_s",
        "_waiting",
        "busy",
        "num_queued_tokens",
        "num_requests",
        "num_tokens",
        "num_waiting",
    )

    def __init__(self) -> None:
        self.busy = RecentShare(BUSY_S)  # time with a prefill at work
        self._waiting: OrderedDict[int, Lease] = OrderedDict()
        self._decoding: dict[int, float] = {}  # `_answer_s` when its first token came
        self._head: Lease | None = None
        self._head_s = 0.0
        self._mtoken2 = 0.0
        self._pace_ms = self._pace_tokens = 0.0  # recent first tokens: time to compute, and tokens
        self._pace_s = 0.0  # when the last of them came
        self._divided_s = 0.0  # until when time is divided
        self._booked_s = 0.0  # time that the waiting prompts are predicted to take still
        self._prompts_s = 0.0  # time that prompts had, without those whose requests are over
        self._computed_s = 0.0  # time that prompts of answers in flight were predicted to take
        self._answer_s = 0.0  # what an answer that was decoded all the time would have got
        self.num_requests = 0  # from dispatch to their last byte
        self.num_waiting = 0  # of these, before their first token
        self.num_queued_tokens = 0  # uncached tokens of the waiting requests
        self.num_tokens = 0  # of all prompts in flight

    @property
    def waiting(self) -> Collection[Lease]:
        """The requests before their first token, oldest first."""
        return self._waiting.values()

    def admit(
        self,
        number: int,
        candidate: CandidateId,
        booking: Booking,
        model: CostModel,
        foreign: Foreign,
        now_s: float,
    ) -> Lease:
        """Book a dispatched request.

        `number` is unique in the process: a lease may outlive its replica and its ledger.
        """
        self._presume(model, now_s)
        num_uncached_tokens = booking.num_uncached_tokens
        self._divide(now_s)
        own = booking.num_mtoken2
        done_tokens, done_pairs = self._head_done(model, now_s)
        ahead = self.num_queued_tokens - done_tokens + foreign.num_queued_tokens
        work = Work(
            num_tokens=ahead + num_uncached_tokens,
            num_mtoken2=max(0.0, self._mtoken2 - done_pairs) + own,
            num_running=len(self._decoding) + foreign.num_requests - foreign.num_waiting,
            num_fetched_tokens=booking.num_fetched_tokens,
            is_from_pool=booking.is_from_pool,
            num_disk_tokens=booking.num_disk_tokens,
        )
        lease = Lease(
            number=number,
            candidate=candidate,
            booking=booking,
            begun_s=now_s,
            num_mtoken2=own,
            work=work,
            predicted_ms=work.predict_ms(model),
            occupies_s=1e-3 * booking.occupies_ms(model),
        )
        self._booked_s += lease.occupies_s
        if self._head is None:
            self._head, self._head_s = lease, now_s
            self.busy.switch(True, now_s)
        self._waiting[number] = lease
        self.num_requests += 1
        self.num_waiting += 1
        self.num_queued_tokens += num_uncached_tokens
        self.num_tokens += num_uncached_tokens + booking.num_cached_tokens
        self._mtoken2 += own
        return lease

    def first_token(self, lease: Lease, now_s: float) -> bool:
        """Move a lease from waiting to decoding; False if it was not waiting."""
        since_s = max(self._head_s, self._pace_s)
        if not self._leave_queue(lease, now_s):
            return False
        self._decoding[lease.number] = self._answer_s
        booking = lease.booking
        if booking.streams and not booking.num_fetched_tokens:
            took_ms = 1000.0 * max(0.0, now_s - since_s)
            self._pace_ms = _PACE_DECAY * self._pace_ms + took_ms
            self._pace_tokens = _PACE_DECAY * self._pace_tokens + booking.num_uncached_tokens
            self._pace_s = now_s
        return True

    def end(self, lease: Lease, now_s: float) -> bool:
        """End a lease in any state; False if that was done before."""
        since = self._decoding.get(lease.number)
        if since is not None:
            self._divide(now_s)
            del self._decoding[lease.number]
            lease.spent.answer_s = self._answer_s - since
        elif not self._leave_queue(lease, now_s):
            return False
        lease.spent.prompt_s = self._prompt_s(lease)
        self.num_requests -= 1
        if not self.num_requests:
            self._prompts_s = self._computed_s = 0.0
        self.num_tokens -= lease.booking.num_uncached_tokens + lease.booking.num_cached_tokens
        return True

    def is_early(self, lease: Lease, model: CostModel, now_s: float) -> bool:
        """Return whether a whole answer, complete now, came before its first token was due."""
        if lease.booking.streams or not lease.booking.num_uncached_tokens:
            return False
        self._presume(model, now_s)
        return lease.number in self._waiting

    def num_timely(self, now_s: float) -> int:
        """Count requests before their first token, which will be seen, and is not long overdue.

        The others do not show what the engine could compute. It may have lost them. Without a
        stream the first token is only presumed.
        """
        return sum(
            [
                lease.booking.streams
                and now_s - lease.begun_s < _LOST_S + _LOST_RATIO * lease.predicted_ms / 1000.0
                for lease in self._waiting.values()
            ]
        )

    def queue_ms(self, model: CostModel, now_s: float) -> float:
        """Predict the time until the prefills ahead are done; 0.0 if there are none.

        A head without prompt tokens (an embedding, an upload) adds nothing, however old it is.
        """
        head = self._head
        if head is not None and not head.booking.streams:
            self._presume(model, now_s)
            head = self._head
        if head is None:
            return 0.0
        token_ms, pair_ms = model.ms_per_token, model.ms_per_mtoken2
        head_ms = token_ms * head.booking.num_uncached_tokens + pair_ms * head.num_mtoken2
        elapsed_ms = (now_s - self._head_s) * 1000.0 if head_ms > 0.0 else 0.0
        left_ms = head_ms - elapsed_ms
        late_ms = _LATE_RATIO * (head_ms if head_ms > elapsed_ms else elapsed_ms)
        if left_ms < late_ms:
            left_ms = late_ms
        if len(self._waiting) == 1:
            return left_ms
        behind_ms = token_ms * self.num_queued_tokens + pair_ms * self._mtoken2 - head_ms
        return left_ms + behind_ms if behind_ms > 0.0 else left_ms

    def queue_at_pace_ms(self) -> float:
        """Return how long the prefills ahead take at the recent pace; 0.0: not known.

        It counts tokens and needs no fit. So it is right in the mean even if no cost can be
        learned: equal prompts that are computed in one step seem to take no time each.
        """
        if not self._pace_tokens:
            return 0.0
        return self._pace_ms / self._pace_tokens * self.num_queued_tokens

    def _presume(self, model: CostModel, now_s: float) -> None:
        """Move heads whose first token is not seen to decoding when it is due."""
        while (head := self._head) is not None and not head.booking.streams:
            due_s = self._head_s + (model.base_ms + _work_ms(model, head)) / 1000.0
            if now_s < due_s:
                break
            self.first_token(head, due_s)

    def _head_done(self, model: CostModel, now_s: float) -> tuple[float, float]:
        """Estimate how much of the head is computed already: tokens, pairs / 1e6."""
        head = self._head
        if head is None:
            return 0.0, 0.0
        head_ms = _work_ms(model, head)
        if head_ms <= 0.0:
            return 0.0, 0.0
        elapsed_ms = max(0.0, now_s - self._head_s) * 1000.0
        share = min(elapsed_ms / head_ms, 1.0 - _LATE_RATIO)
        return share * head.booking.num_uncached_tokens, share * head.num_mtoken2

    def _divide(self, now_s: float) -> None:
        """Divide the time since the last change among the requests there.

        Waiting prompts get what they are predicted to take. All requests have equal shares of the
        rest, and only answers use theirs: another router's first token is known late. If there are
        no answers, prompts get all of it. So all requests together, of all routers that share their
        load, get at most the time that passed.
        """
        passed_s = max(0.0, now_s - self._divided_s)
        self._divided_s += passed_s
        if self._waiting:
            of_prompts_s = min(passed_s, self._booked_s) if self._decoding else passed_s
            self._booked_s = max(0.0, self._booked_s - of_prompts_s)
            self._prompts_s += of_prompts_s
            passed_s -= of_prompts_s
        if self._decoding:
            self._answer_s += passed_s / self.num_requests

    def _prompt_s(self, lease: Lease) -> float:
        """Return the time that a prompt may have taken at most, at its request's end.

        The others of answers in flight have what they are predicted to take. If all prompts had
        less time than that, each has its part of it, whatever the order of first tokens: routers
        know their own ones first.
        """
        had_s, all_s, waited_s = self._prompts_s, self._computed_s, lease.spent.prompt_s
        claim_s = min(lease.occupies_s, waited_s)
        most_s = had_s - (all_s - claim_s) if had_s >= all_s else had_s * claim_s / all_s
        most_s = max(0.0, min(waited_s, most_s))
        self._prompts_s = max(0.0, had_s - min(claim_s, most_s))
        self._computed_s = max(0.0, all_s - claim_s)
        return most_s

    def _leave_queue(self, lease: Lease, now_s: float) -> bool:
        """Remove a lease from the waiting ones; after a head, the next is computed from now on."""
        if lease.number not in self._waiting:
            return False
        self._divide(now_s)
        del self._waiting[lease.number]
        lease.spent.prompt_s = max(0.0, now_s - lease.begun_s)
        self._computed_s += min(lease.occupies_s, lease.spent.prompt_s)
        self.num_waiting -= 1
        self.num_queued_tokens -= lease.booking.num_uncached_tokens
        self._mtoken2 -= lease.num_mtoken2
        if not self._waiting:
            self._head, self._mtoken2 = None, 0.0  # floats drift: an empty queue is exactly empty
            self._booked_s = 0.0
            self.busy.switch(False, now_s)
        elif self._head is lease:
            self._head, self._head_s = next(iter(self._waiting.values())), now_s
        return True


def _work_ms(model: CostModel, lease: Lease) -> float:
    """Predict the engine's time for one prefill, without the latency of all first tokens.

    `base_ms` is latency (HTTP, scheduling, one step), not occupancy. Requests behind do not wait
    for it: an engine batches many small prefills into one step.
    """
    return model.ms_per_token * lease.booking.num_uncached_tokens + (
        model.ms_per_mtoken2 * lease.num_mtoken2
    )
