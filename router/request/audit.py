"""The proof of local tokens: each answer's count, and a sample of prompts encoded whole.

A sample is encoded by `tokenizers`, so it checks the pieces, the memory of prefixes and fastokens.
What an engine made of ids that it was handed proves nothing.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Executor
from functools import partial
from time import monotonic

import orjson

from router.api.apis import Request
from router.metrics import Metrics
from router.request.plan import Placement
from router.request.results import Inbound, Prompt
from router.request.send import Sent
from router.tokens import Prompter, Prompters
from router.tokens.hand_over import HandOver
from router.tokens.trust import FLAGS

logger = logging.getLogger(__name__)


class TokenAudit:
    """Compares our tokens with the engines', and reports differences to `trust` and `hand_over`.

    Args:
        hand_over: Gets the evidence for and against handing ids over.
        prove_ratio: Share of prompts that are encoded whole.
        encoders: Where that is done.
    """

    def __init__(
        self,
        prompters: Prompters,
        *,
        hand_over: HandOver,
        prove_ratio: float,
        encoders: Executor,
        metrics: Metrics,
    ) -> None:
        self._prompters = prompters
        self._hand_over = hand_over
        self._prove_ratio = prove_ratio
        self._encoders = encoders
        self._metrics = metrics
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
        if sent.kind is not None:
            self._hand_over.observe_match(prompt.read.model or "", sent.kind)
        self._sample(prompt, prompter)

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


def _read_again(inbound: Inbound) -> Request:
    """Parse a body again: its parsed content was dropped."""
    assert inbound.api.parse is not None
    return inbound.api.parse(orjson.loads(inbound.body or b""))
