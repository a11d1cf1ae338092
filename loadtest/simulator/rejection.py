"""Rules by which halves refuse what is too much: of first tokens alone, and Mooncake's three.

prompts         a prompt is refused when it comes and prefill is overloaded; no answer is
after_prefill   and an answer that would be too slow when its prompt is computed: that work is lost
on_arrival      both are looked at when it comes ("early rejection")
predicted       likewise, but the load of the decode replicas is the one predicted for the moment at
                which its prompt will be computed

Under the last two what an answer takes is looked at once more when its prompt is computed, as a
decode instance does ("double-check").

The load of the prefill replicas is the mean of the longest predicted time to a first token at each
over its limit, that of the decode replicas their mean time between tokens over its limit; beyond
1.0 they are overloaded. So a prompt is refused for what is there, not for its own length.

`predicted` is the paper's prediction at the level of the system: every answer lasts equally long;
by then, those that have run for so long are over, and those whose prompts are computed until then
have begun. How long is not said there. Here it is what makes the prediction right in the mean,
learned from its errors: with the mean of answers of late it is too low, since of those that have
not run for so long some are over, too.

Source: arXiv 2407.00079, sections 3, 7.1 to 7.4, 8.2.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from loadtest.simulator.router import Choice
from loadtest.simulator.setup import Rejection, Setup
from loadtest.workload import TurnKey

_LEARNED: Final = 0.1  # part of an answer's time, for a prediction that is wrong by the limit


class LoadSample(Struct, frozen=True, gc=False):
    """The load of both halves as a request came; 1.0 is at the limit."""

    at_s: float
    prefill: float
    decode: float


class Overload(Struct, frozen=True, kw_only=True):
    """What was refused, and what the halves' load was meanwhile."""

    num_late_prompts: int  # refused on arrival: prefill was overloaded
    num_slow_answers: int  # refused on arrival: the answer would be too slow
    num_wasted: int  # refused after their prompt was computed
    num_wasted_tokens: int  # of those prompts, cached ones included
    samples: tuple[LoadSample, ...]
    load_errors: tuple[float, ...] = ()
    """Of prompts let in by the decode load: what it was when they were computed, less what they
    were let in by. Positive: it was taken to be lower."""


class _Prompt(Struct, gc=False):
    num_tokens: int
    due_s: float  # when it is predicted to be computed
    load: float | None  # of the decode replicas, by which it was let in; None: by no such load


class _Answer(Struct, gc=False):
    num_tokens: int
    since_s: float


class Gate:
    """Refuses by a rule. Knows which prompts and which answers are under way."""

    def __init__(self, rules: Rejection, setup: Setup) -> None:
        if setup.halves is None or setup.queue is not None:
            raise ValueError("rejection needs halves, and no queue")
        self._rules = rules
        self._times = setup.times
        self._num_decode = setup.halves.num_decode
        self._prompts: dict[TurnKey, _Prompt] = {}
        self._answers: dict[TurnKey, _Answer] = {}  # in the order in which they began
        self._answer_s = 0.0  # that an answer is taken to last; 0.0: none is over yet
        self._load: float | None = None  # by which the last one was let in
        self._num_late_prompts = self._num_slow_answers = 0
        self._num_wasted = self._num_wasted_tokens = 0
        self._samples: list[LoadSample] = []
        self._load_errors: list[float] = []

    def admits(self, choice: Choice, now_s: float) -> bool:
        """Judge a request that comes."""
        prompt = choice.prompt
        self._load = None
        queues_ms = [view.queue_ms for view in prompt.snapshot.replicas]
        prefill = 1e-3 * sum(queues_ms) / len(queues_ms) / self._rules.slo_ttft_s
        if prompt is not choice:
            self._samples.append(LoadSample(now_s, prefill, self._decode_load(0)))
        if prefill > 1.0:
            self._num_late_prompts += 1
            return False
        is_first_look = self._rules.rule in ("on_arrival", "predicted") or prompt is choice
        if self._rules.rule == "prompts" or not is_first_look:
            return True
        self._load = self._expected(choice.ask.num_tokens, now_s + _ttft_s(choice))
        if self._load > 1.0:
            self._num_slow_answers += 1
            return False
        return True

    def began(self, key: TurnKey, choice: Choice, now_s: float) -> None:
        """Note a request that is sent: its prompt, or where it is computed, too, its answer."""
        num_tokens = choice.ask.num_tokens
        if choice.prompt is choice:
            self._answers[key] = _Answer(num_tokens, now_s)
        else:
            self._prompts[key] = _Prompt(num_tokens, now_s + _ttft_s(choice), self._load)

    def prefilled(self, key: TurnKey, now_s: float) -> bool:
        """Judge a request once more whose prompt is computed by now."""
        prompt = self._prompts.pop(key)
        load = self._decode_load(prompt.num_tokens)
        if prompt.load is not None:
            self._load_errors.append(load - prompt.load)
            self._answer_s *= 1.0 + _LEARNED * (load - prompt.load)
        if self._rules.rule != "prompts" and load > 1.0:
            self._num_wasted += 1
            self._num_wasted_tokens += prompt.num_tokens
            return False
        self._answers[key] = _Answer(prompt.num_tokens, now_s)
        return True

    def ended(self, key: TurnKey, now_s: float) -> None:
        """Note that an answer is over."""
        took_s = now_s - self._answers.pop(key).since_s
        self._answer_s = self._answer_s or took_s

    def outcome(self) -> Overload:
        """Return what was refused so far."""
        return Overload(
            num_late_prompts=self._num_late_prompts,
            num_slow_answers=self._num_slow_answers,
            num_wasted=self._num_wasted,
            num_wasted_tokens=self._num_wasted_tokens,
            samples=tuple(self._samples),
            load_errors=tuple(self._load_errors),
        )

    def _expected(self, num_tokens: int, at_s: float) -> float:
        """Return the load of the decode replicas by which a request is judged when it comes.

        Its answer will begin at `at_s`.
        """
        if self._rules.rule != "predicted":
            return self._decode_load(num_tokens)
        since_s = at_s - self._answer_s
        there = [each.num_tokens for each in self._answers.values() if each.since_s > since_s]
        there += [
            each.num_tokens for each in self._prompts.values() if since_s < each.due_s <= at_s
        ]
        return self._load_of(len(there) + 1, sum(there) + num_tokens)

    def _decode_load(self, num_more_tokens: int) -> float:
        """Return the load of the decode replicas now; 0 more tokens: no answer more."""
        num_tokens = sum([each.num_tokens for each in self._answers.values()])
        num_answers = len(self._answers) + (num_more_tokens > 0)
        return self._load_of(num_answers, num_tokens + num_more_tokens)

    def _load_of(self, num_answers: int, num_tokens: int) -> float:
        """Return the load of the decode replicas with so many answers of so many tokens in all."""
        times, share = self._times, 1.0 / self._num_decode
        tbt_ms = times.base_ms + share * (
            times.ms_per_decode * num_answers + times.ms_per_mtoken_context * 1e-6 * num_tokens
        )
        return 1e-3 * tbt_ms / self._rules.slo_tbt_s


def _ttft_s(choice: Choice) -> float:
    """Predict when a prompt is computed, from now."""
    prompt = choice.prompt
    [own] = [cost for cost in prompt.costs() if cost.id == prompt.candidate.id]
    return 1e-3 * own.ttft_ms
