"""The proof of local tokens: each answer's count, and a sample of prompts encoded whole.

A sample is encoded by `tokenizers`, so it checks the pieces, the memory of prefixes and fastokens.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor
from functools import partial
from time import monotonic

import orjson

from router.api.apis import Request
from router.index.cache_view import CacheView
from router.metrics import Metrics
from router.request.block_evidence import BlockEvidence, Expected
from router.request.plan import Placement
from router.request.results import Inbound, Prompt
from router.request.send import Sent
from router.tokens import Prompter, Prompters
from router.tokens.hand_over import HandOver
from router.tokens.id_probe import FLAGS, RELEASES

logger = logging.getLogger(__name__)


class TokenAudit:
    """Compares our tokens with the engines', and reports differences to `trust` and `hand_over`.

    Args:
        hand_over: Gets the evidence for and against handing ids over.
        caches: Where the blocks of prompts show up that engines tokenized themselves.
        prove_ratio: Share of prompts that are encoded whole.
        encoders: Where that is done.
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
    ) -> None:
        self._prompters = prompters
        self._hand_over = hand_over
        self._prove_ratio = prove_ratio
        self._encoders = encoders
        self._metrics = metrics
        self._blocks = BlockEvidence(caches, self._observe_blocks)
        self._num_requests = 0
        self._proof_runs = False
        self._next_proof_s = 0.0

    def audit(
        self, prompt: Prompt, placement: Placement, sent: Sent, num_engine_tokens: int
    ) -> None:
        """Compare our count of a prompt with that of the replica it was sent to."""
        prompter = self._prompters.get(prompt.model) if prompt.model is not None else None
        if prompter is not None and prompt.tokenized.way == "media":
            self._audit_media(prompt, prompter, num_engine_tokens)
            return
        if prompter is None or not (
            prompt.tokenized.is_refused_here or prompt.tokenized.way == "local"
        ):
            return
        failure = prompter.failure()
        if failure is not None:
            self._note_fallback(prompt, "failed", failure)
        replica = placement.replica
        if sent.has_ids:  # the engine counted our ids
            if num_engine_tokens != prompt.num_tokens:
                self._metrics.token_mismatches.labels(prompt.model or "", "handed_over").inc()
                self._hand_over.suspend(prompt.model or "", "count", monotonic())
            else:
                self._sample(prompt, prompter)
            return
        disagreed = prompter.trust.disagrees(replica)
        is_match = prompter.trust.observe_usage(
            replica,
            0 if prompt.tokenized.is_refused_here else prompt.num_tokens,
            num_engine_tokens,
            has_others=placement.had_others,
            now_s=asyncio.get_running_loop().time(),
        )
        if (
            prompt.tokenized.is_refused_here
        ):  # but not by the engine: our template is not the engine's
            self._mismatch(prompt, "template", prompter, replica, is_new=not disagreed)
            return
        if is_match and prompt.read.chat is not None and prompter.trust.reason is None:
            prompter.trust.proven.add((prompt.inbound.api.name, prompt.read.chat.has_tool_choice))
        if not is_match:
            self._mismatch(prompt, "usage", prompter, replica, is_new=not disagreed)
            if prompter.is_fast and self._may_prove():
                self._prove(prompt, prompter)  # it may be fastokens' fault
            return
        shows_blocks = prompt.read.chat is not None and self._blocks.expect(
            prompt, placement, sent.kind, monotonic()
        )
        if sent.kind is not None and not shows_blocks:
            self._hand_over.observe_match(prompt.model or "", sent.kind)
        self._sample(prompt, prompter)

    def sweep(self, now_s: float) -> None:
        """Look for blocks that are still to come."""
        self._blocks.sweep(now_s)

    def _observe_blocks(self, expected: Expected, came: bool) -> None:
        """Note whether an engine has our ids of a prompt that it tokenized itself."""
        prompter = self._prompters.get(expected.model)
        replica = expected.placement.candidate.replica
        if prompter is None:
            return
        was_known = prompter.trust.num_missed(replica.name) > 0
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
        if prompter.media is not None and not prompt.tokenized.has_named_media:
            prompter.media.observe_count(is_same, monotonic())
        if not is_same:
            self._metrics.token_mismatches.labels(prompt.model or "", "media").inc()
        if not is_same and not prompt.tokenized.has_named_media:
            logger.error(
                "prompts with media differ from the engine's; tokens after an item are not matched",
                extra={"model": prompt.model, "request": prompt.read.request_id},
            )

    def is_partial(
        self, prompt: Prompt, placement: Placement, num_reported: int, block_size: int
    ) -> bool:
        """Return whether an engine reused more of a prompt than was to be known of it.

        Behind an image or a sound: one that is not known, or of which the name is not proven yet.
        Also notes what speaks for the names and against.
        """
        if not prompt.tokenized.has_media or prompt.tokens is None:
            return False
        num_predicted = placement.num_cached_tokens
        if prompt.tokenized.way == "prefix":
            is_at_end = num_predicted + block_size > prompt.tokenized.num_named_tokens
            return is_at_end and num_reported > num_predicted
        if prompt.tokenized.way != "media":
            return num_reported > num_predicted
        prompter = self._prompters.get(prompt.model or "")
        book = prompter.media if prompter is not None else None
        if book is None:
            return num_reported > num_predicted
        if (
            prompt.tokenized.num_named_tokens < prompt.tokens.num_tokens
        ):  # some name is not known yet
            is_at_end = num_predicted + block_size > prompt.tokenized.num_named_tokens
            return is_at_end and num_reported > num_predicted
        is_in_text = num_predicted + block_size <= prompt.tokenized.num_head_tokens
        if placement.state == "exact" and not is_in_text and not prompt.tokenized.has_named_media:
            if num_reported > num_predicted:
                book.observe_reuse(False, monotonic())
            elif num_reported == num_predicted > prompt.tokenized.num_head_tokens:
                book.observe_reuse(True, monotonic())
        return num_reported > num_predicted and not is_in_text and not book.is_proven

    def _sample(self, prompt: Prompt, prompter: Prompter) -> None:
        """Prove one of many prompts."""
        self._num_requests += 1
        if self._is_sampled() and self._may_prove():
            self._prove(prompt, prompter)

    def _is_sampled(self) -> bool:
        """Take every n-th request, the first among them."""
        ratio = self._prove_ratio
        return ratio > 0 and (self._num_requests - 1) % max(1, round(1 / ratio)) == 0

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
        read = partial(_read_again, prompt.inbound)
        tokens, is_chat = prompt.tokens, prompt.read.chat is not None
        proof = loop.run_in_executor(self._encoders, lambda: prompter.prove(read(), tokens))

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
                self._hand_over.suspend(prompt.model or "", "tokens", monotonic())
            elif verdict == "pieces":
                self._mismatch(prompt, "full_encode", prompter)

        proof.add_done_callback(note)

    def _note_fallback(self, prompt: Prompt, reason: str, detail: str) -> None:
        self._metrics.encoder_fallbacks.labels(prompt.model or "", reason).inc()
        logger.error(
            "fastokens is replaced by tokenizers", extra={"model": prompt.model, "reason": detail}
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
        self._metrics.token_mismatches.labels(prompt.model or "", against).inc()
        self._hand_over.suspend(prompt.model or "", "tokens", monotonic())
        said = {"model": prompt.model, "request": prompt.read.request_id, "replica": replica}
        reason = prompter.trust.reason
        if reason is not None:
            logger.error(
                "tokens differ from the engine's; the engine tokenizes for a while",
                extra={**said, "reason": reason, "hint": FLAGS},
            )
        elif is_new:
            logger.error("replica counts other tokens than the rest; it is ignored", extra=said)


def _read_again(inbound: Inbound) -> Request:
    """Parse a body again: its parsed content was dropped."""
    assert inbound.api.parse is not None
    return inbound.api.parse(orjson.loads(inbound.body or b""))
