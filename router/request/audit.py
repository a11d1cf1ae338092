"""The proof of local tokens: each answer's count, and a sample of prompts encoded whole.

A sample is encoded by `tokenizers`, so it checks the pieces, the memory of prefixes and fastokens.

Equal block hashes are equal ids, because a block's hash covers the ids of its prompt up to its
end. Equal counts are not. So blocks that engines store for prompts that they tokenized themselves
are compared, too. What an engine made of ids that it was handed proves nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from time import monotonic
from typing import Final

import orjson
from msgspec import Struct

from router.api.apis import Request
from router.base.contracts import BlockKey
from router.index.cache_view import CacheView
from router.metrics import Metrics
from router.request.plan import Placement
from router.request.results import Inbound, Prompt
from router.request.send import Sent
from router.request.settling import Settling
from router.tokens import Prompter, Prompters
from router.tokens.hand_over import HandOver, Kind
from router.tokens.id_probe import FLAGS, RELEASES

logger = logging.getLogger(__name__)

_PATIENCE_S: Final = 10.0  # events take 0.1 s, a replay of history some more
_MAX_WAITING: Final = 256


class TokenAudit:
    """Compares our tokens with the engines', and reports differences to `trust` and `hand_over`.

    Args:
        hand_over: Gets the evidence for and against handing ids over.
        caches: Where the blocks of prompts show up that engines tokenized themselves.
        prove_ratio: Share of prompts that are encoded whole.
        encoders: Where that is done.
        settling: Waits for the events of prompts that went as text.
    """

    def __init__(
        self,
        prompters: Prompters,
        *,
        hand_over: HandOver,
        caches: CacheView,
        prove_ratio: float,
        encoders: Executor,
        metrics: Metrics,
        settling: Settling,
    ) -> None:
        self._prompters = prompters
        self._hand_over = hand_over
        self._prove_ratio = prove_ratio
        self._encoders = encoders
        self._metrics = metrics
        self._blocks = _BlockEvidence(caches, settling, self._observe_blocks)
        self._num_requests = 0
        self._proof_runs = False
        self._next_proof_s = 0.0

    def audit(
        self, prompt: Prompt, placement: Placement, sent: Sent, num_engine_tokens: int
    ) -> None:
        """Compare our count of a prompt with that of the replica it was sent to."""
        prompter = self._prompters.get(prompt.read.model) if prompt.read.model is not None else None
        if prompter is not None and prompt.way == "media":
            self._audit_media(prompt, prompter, num_engine_tokens)
            return
        if prompter is None or not (prompt.is_refused_here or prompt.way == "local"):
            return
        encoder = prompter.encoder
        if encoder.failure is not None:
            self._note_fallback(prompt, "failed", encoder.failure)
            encoder.failure = None
        replica = placement.replica
        if sent.has_ids:  # the engine counted our ids
            if num_engine_tokens != prompt.num_tokens:
                self._metrics.token_mismatches.labels(prompt.read.model or "", "handed_over").inc()
                self._hand_over.suspend(prompt.read.model or "", "count", monotonic())
            else:
                self._sample(prompt, prompter)
            return
        disagreed = prompter.trust.disagrees(replica)
        is_match = prompter.trust.observe_usage(
            replica,
            0 if prompt.is_refused_here else prompt.num_tokens,
            num_engine_tokens,
            has_others=placement.had_others,
            now_s=asyncio.get_running_loop().time(),
        )
        if prompt.is_refused_here:  # but not by the engine: our template is not the engine's
            self._mismatch(prompt, "template", prompter, replica, is_new=not disagreed)
            return
        chat = prompt.read.chat
        if is_match and chat is not None and prompter.trust.reason is None:
            prompter.trust.proven.add((prompt.read.inbound.api.name, chat.has_tool_choice))
        if not is_match:
            self._mismatch(prompt, "usage", prompter, replica, is_new=not disagreed)
            if prompter.encoder.is_fast and self._may_prove():
                self._prove(prompt, prompter)  # it may be fastokens' fault
            return
        shows_blocks = chat is not None and self._blocks.expect(
            prompt, placement, sent.kind, monotonic()
        )
        if sent.kind is not None and not shows_blocks:
            self._hand_over.observe_match(prompt.read.model or "", sent.kind)
        self._sample(prompt, prompter)

    def _observe_blocks(self, expected: _Expected, came: bool) -> None:
        """Record whether an engine has our ids of a prompt that it tokenized itself."""
        prompter = self._prompters.get(expected.model)
        replica = expected.placement.candidate.replica
        if prompter is None:
            return
        was_known = not came and prompter.trust.num_missed(replica.name) > 0
        ended = prompter.trust.reason
        prompter.trust.observe_blocks(
            replica.name,
            came,
            has_others=expected.placement.had_others,
            now_s=asyncio.get_running_loop().time(),
        )
        if came:
            if expected.kind is not None:
                self._hand_over.observe_match(expected.model, expected.kind)
            return
        self._metrics.token_mismatches.labels(expected.model, "blocks").inc()
        self._hand_over.suspend(expected.model, "ids", monotonic())
        if was_known and ended == prompter.trust.reason:
            return
        logger.error(
            "engine stored other blocks for a prompt than the router computed",
            extra={
                "model": expected.model,
                "replica": replica.name,
                "reason": prompter.trust.reason,
                "hint": f"{RELEASES}; {FLAGS}",
            },
        )

    def _audit_media(self, prompt: Prompt, prompter: Prompter, num_engine_tokens: int) -> None:
        """Compare the count of a prompt with media; a difference ends these alone, for a while.

        Not where a client named items: it may give two the same name, and the engine has one.
        """
        is_same = num_engine_tokens == prompt.num_tokens
        if not prompt.has_named_media:
            prompter.media.observe_count(is_same, monotonic())
        if not is_same:
            self._metrics.token_mismatches.labels(prompt.read.model or "", "media").inc()
        if not is_same and not prompt.has_named_media:
            logger.error(
                "prompts with media differ from the engine's; tokens after an item are not matched",
                extra={"model": prompt.read.model, "request": prompt.read.request_id},
            )

    def _sample(self, prompt: Prompt, prompter: Prompter) -> None:
        """Prove one of many prompts."""
        self._num_requests += 1
        ratio = self._prove_ratio
        is_sampled = ratio > 0 and (self._num_requests - 1) % max(1, round(1 / ratio)) == 0
        if is_sampled and self._may_prove():  # every n-th, the first among them
            self._prove(prompt, prompter)

    def _may_prove(self) -> bool:
        """Return whether no proof runs, and those before have not had their share of the time."""
        now_s = asyncio.get_running_loop().time()
        return self._prove_ratio > 0 and not self._proof_runs and now_s >= self._next_proof_s

    def _prove(self, prompt: Prompt, prompter: Prompter) -> None:
        """Encode the prompt whole, off the loop; one at a time, and no larger a share of the time.

        One of a hundred long prompts encoded whole is a fifth of the CPU of all of them: after a
        proof that took t there is none for t / ratio.
        """
        assert prompt.tokens is not None
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        self._proof_runs = True
        read = partial(_read_again, prompt.read.inbound)
        tokens, is_chat = prompt.tokens, prompt.read.chat is not None
        proves = prompter.reference.proves
        proof = loop.run_in_executor(self._encoders, lambda: proves(read(), tokens))

        def note(done: asyncio.Future[bool]) -> None:
            self._proof_runs = False
            now_s = loop.time()
            self._next_proof_s = now_s + (now_s - started_s) * (1 / self._prove_ratio - 1)
            if done.cancelled() or done.exception() is not None:
                return  # suspect meanwhile, or refused: no proof of anything
            verdict = prompter.observe_proof(
                tokens, is_chat=is_chat, is_same=done.result(), now_s=now_s
            )
            if verdict == "fast":
                self._note_fallback(prompt, "sample", "other ids for a prompt")
                self._hand_over.suspend(prompt.read.model or "", "tokens", monotonic())
            elif verdict == "pieces":
                self._mismatch(prompt, "full_encode", prompter)

        proof.add_done_callback(note)

    def _note_fallback(self, prompt: Prompt, reason: str, detail: str) -> None:
        self._metrics.encoder_fallbacks.labels(prompt.read.model or "", reason).inc()
        logger.error(
            "fastokens is replaced by tokenizers",
            extra={"model": prompt.read.model, "reason": detail},
        )

    def _mismatch(
        self,
        prompt: Prompt,
        against: str,
        prompter: Prompter,
        replica: str | None = None,
        *,
        is_new: bool = True,
    ) -> None:
        """Count it; log once what is suspect from now on."""
        self._metrics.token_mismatches.labels(prompt.read.model or "", against).inc()
        self._hand_over.suspend(prompt.read.model or "", "tokens", monotonic())
        said = {"model": prompt.read.model, "request": prompt.read.request_id, "replica": replica}
        reason = prompter.trust.reason
        if reason is not None:
            logger.error(
                "tokens differ from the engine's; the engine tokenizes for a while",
                extra={**said, "reason": reason, "hint": FLAGS},
            )
        elif is_new:
            logger.error("replica counts other tokens than the rest; it is ignored", extra=said)


class _Expected(Struct, frozen=True, kw_only=True):
    """A prompt whose last full block should be stored."""

    model: str
    kind: Kind | None
    placement: Placement
    key: BlockKey
    epoch: int


class _BlockEvidence:
    """Finds the blocks of prompts that went as text.

    Args:
        note: Takes a prompt and whether its blocks came.
    """

    def __init__(
        self, caches: CacheView, settling: Settling, note: Callable[[_Expected, bool], None]
    ) -> None:
        self._caches = caches
        self._settling = settling
        self._note = note
        self._num_waiting = 0

    def expect(self, prompt: Prompt, placement: Placement, kind: Kind | None, now_s: float) -> bool:
        """Wait for a chat's blocks where its prompt is computed.

        Returns False if blocks of that replica are not seen here: it publishes no events, or they
        are looked up in Redis.
        """
        placement = placement.helper or placement
        candidate, claim = placement.lease.candidate, placement.claim
        stream = self._caches.stream(candidate)
        if not placement.candidate.replica.publishes_events:
            return False
        if stream is None or stream.is_blind:
            return True
        if not self._caches.index.num_blocks(candidate):
            return False
        if claim is None or prompt.extra.lora is not None:
            return True
        num_held = placement.predicted.num_gpu_tokens // stream.contract.block_size
        if num_held < len(claim.keys) and self._num_waiting < _MAX_WAITING:
            expected = _Expected(
                model=prompt.read.model or "",
                kind=kind,
                placement=placement,
                key=claim.keys[-1],
                epoch=self._caches.index.epoch(candidate),
            )
            if not self._settle(expected, False):
                self._num_waiting += 1
                self._settling.add(partial(self._look_again, expected), now_s + _PATIENCE_S)
        return True

    def _look_again(self, expected: _Expected, is_last: bool) -> bool:
        is_settled = self._settle(expected, is_last)
        self._num_waiting -= is_settled
        return is_settled

    def _settle(self, expected: _Expected, is_last: bool) -> bool:
        """Report an outcome. False: there is none yet."""
        candidate, index = expected.placement.lease.candidate, self._caches.index
        stream = self._caches.stream(candidate)
        if stream is None or index.epoch(candidate) != expected.epoch:
            return True  # its engine is another process, or its cache was cleared
        if index.holds(candidate, expected.key) or index.was_evicted(candidate, expected.key):
            self._note(expected, True)
            return True
        if is_last and stream.state == "exact" and not index.has_groups(candidate):
            self._note(expected, False)
        return is_last


def _read_again(inbound: Inbound) -> Request:
    """Parse a body again: its parsed content was dropped."""
    assert inbound.api.parse is not None
    return inbound.api.parse(orjson.loads(inbound.body or b""))
