"""Stage 2: a prompt's token ids; locally, else at an engine, else not at all.

Local tokens are proven at run time: a sample is encoded whole and compared, and every answer's
`prompt_tokens` is. If they are wrong, the engine gets the model's prompts for a while (see
TokenTrust).
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from functools import partial
from typing import Final, TypeVar

import orjson
from msgspec.structs import replace

from router.api.fit import check_fits, check_text_fits, sizes_of, sizes_of_outline, too_many_tokens
from router.api.openai import (
    ChatRequest,
    CompletionRequest,
    parse_chat,
    parse_completion,
    tokenize_body,
)
from router.api.stream_events import Transcript
from router.config import TokensConfig
from router.contracts import HashContract
from router.data_path.continuation import NotContinued, Terms
from router.data_path.job import Job, Placement
from router.discovery.engine_api import EngineApi
from router.errors import BadRequest, RouterError, TemplateFailed, UpstreamError
from router.metrics import Metrics
from router.tokens import NeedsEngine, Prompter, Prompters, Tokens

logger = logging.getLogger(__name__)

_BYTES_PER_TOKEN: Final = 4  # where a prompt's tokens cannot be known at all
_MAX_BYTES_PER_TOKEN: Final = 8  # in the mean of a whole prompt; text has about 4
_MAX_TOKENS: Final = 1_000_000  # where the engine does not say what it takes at most
_HEAVY_BYTES: Final = 1 << 20  # of a body or of new text: not in the way of others' prompts
_HEAVY_TOKENS: Final = 32_768  # hashing them takes 3 ms, and several times that where it is slow
_HEAVY_ITEMS: Final = 1_000  # that a template goes through: some 6 µs each, a tool 30
_MAX_ITEMS: Final = 10_000
_MAX_HEAVY: Final = 8  # waiting at once; more are routed without tokens
_MAX_ENGINE_BYTES: Final = 2 << 20  # of a body that is written anew for an engine's /tokenize
_T = TypeVar("_T")

EngineAddress = Callable[[str], tuple[str, str] | None]
"""Model -> name and base URL of a replica that may be asked; None: nobody is up."""

MaxTokens = Callable[[str], int | None]
"""Model -> longest prompt its engines take, in tokens; None: not known."""


class Tokenizer:
    """Finds the tokens of prompts.

    Args:
        encoders: Where long encodes run; they hold the GIL little.
        heavy: Where what takes seconds runs, so that it is in nobody's way.
        engine_address: Whom to ask what cannot be tokenized here.
        max_tokens: What is far too long is not tokenized: the engine refuses it, and here it
            would keep others waiting (about 0.2 s a megabyte).
    """

    def __init__(
        self,
        *,
        config: TokensConfig,
        prompters: Prompters,
        encoders: Executor,
        heavy: Executor,
        engine_api: EngineApi,
        engine_address: EngineAddress,
        max_tokens: MaxTokens,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._prompters = prompters
        self._encoders = encoders
        self._heavy = heavy
        self._num_heavy = 0
        self._engine_api = engine_api
        self._engine_address = engine_address
        self._max_tokens = max_tokens
        self._metrics = metrics
        self._num_requests = 0
        self._proof_runs = False
        self._next_proof_s = 0.0

    async def fill(self, job: Job) -> None:
        """Set the job's tokens (None: unknown), their number (else an estimate) and their way.

        Raises:
            BadRequest: it surely does not fit the model.
            TemplateFailed: the chat template, proven to be the engine's, refuses the prompt.
        """
        prompter = self._prompters.get(job.model) if job.model is not None else None
        self._check_fits(job, prompter)
        if prompter is not None and job.prompt is not None:
            try:
                if prompter.trust.try_again(asyncio.get_running_loop().time()):
                    logger.info("local tokens are tried again", extra={"model": job.model})
                await self._find(job, prompter)
            except TemplateFailed:
                if prompter.trust.num_matches:
                    raise
                job.is_refused_here = True  # the engine may have been given another template
            except RouterError:
                raise
            except Exception as exc:  # our bug or a library's: it costs a match, not a request
                self._note_bug(job, exc)
        self._metrics.tokenized.labels(job.way).inc()
        if job.tokens is not None:
            job.num_tokens = job.tokens.num_tokens
        else:
            job.num_tokens = len(job.inbound.body or b"") // _BYTES_PER_TOKEN

    async def _find(self, job: Job, prompter: Prompter) -> None:
        """Set the tokens and their way.

        Raises:
            TemplateFailed: our chat template refuses the prompt.
        """
        try:
            job.tokens = await self._locally(job, prompter)
            way = "local"
        except NeedsEngine as exc:
            job.tokens = await self._at_an_engine(job, prompter, exc)
            way = "engine"
        if job.tokens is not None:
            job.way = way

    def _check_fits(self, job: Job, prompter: Prompter | None) -> None:
        """Refuse what is surely too long, before anything is made of it.

        Raises:
            BadRequest: it is.
        """
        longest = self._max_tokens(job.model) if job.model is not None else None
        if longest is None or job.prompt is None:
            return
        outline = job.outline
        sizes = sizes_of_outline(outline) if outline is not None else sizes_of(job.prompt)
        check_fits(sizes, longest, prompter.max_chars_per_token if prompter is not None else None)

    async def _locally(self, job: Job, prompter: Prompter) -> Tokens | None:
        longest = self._max_tokens(job.model or "")
        if job.chat is not None:
            text = await self._rendered(job, job.chat, prompter)
            most = prompter.max_chars_per_token
            if longest is not None and most is not None and prompter.trust.num_matches:
                check_text_fits(len(text), longest, most)
            if len(text) > (longest or _MAX_TOKENS) * _MAX_BYTES_PER_TOKEN:
                return None
            plan = prompter.plan_text(
                text, add_special_tokens=job.chat.add_special_tokens, owner=_owner(job)
            )
        else:
            assert job.completion is not None
            if _num_chars(job.completion) > (longest or _MAX_TOKENS) * _MAX_BYTES_PER_TOKEN:
                return None
            plan = prompter.plan_completion(job.completion, owner=_owner(job))
        if plan.num_new_chars > _HEAVY_BYTES:
            encoded = await self._heavily(plan.encode)
        elif plan.num_new_chars > self._config.inline_chars:
            encoded = await self._off_loop(plan.encode)
        else:
            encoded = plan.encode()
        num_tokens = plan.num_known_tokens + sum(map(len, encoded))
        if num_tokens > (longest or _MAX_TOKENS):  # its chain would be worth nothing
            if longest is not None and prompter.trust.num_matches:
                raise too_many_tokens(num_tokens, longest)
            return None
        return prompter.commit(plan, encoded)

    def is_long(self, tokens: Tokens) -> bool:
        """Say whether a prompt's chain should be hashed ahead."""
        return tokens.num_new_tokens > _HEAVY_TOKENS

    async def hash_ahead(self, job: Job, contracts: Iterable[HashContract]) -> None:
        """Hash a prompt's chain, in steps and beside the loop."""
        assert job.tokens is not None
        for contract in contracts:
            steps = job.tokens.hashing(contract, job.extra)
            try:
                work = next(steps)
                while True:
                    if work is None:
                        await asyncio.sleep(0)
                        work = next(steps)
                    else:
                        work = steps.send(await self._off_loop(work))
            except StopIteration:
                pass

    async def _rendered(self, job: Job, chat: ChatRequest, prompter: Prompter) -> str:
        """Render a chat; what is large beside the loop, and what is huge not at all.

        Raises:
            NeedsEngine, TemplateFailed: as `Prompter.render`.
        """
        num_items = chat.num_items
        if num_items > _MAX_ITEMS:
            raise NeedsEngine("size")
        if num_items > _HEAVY_ITEMS or len(job.inbound.body or b"") > _HEAVY_BYTES:
            return await self._heavily(partial(prompter.render, chat, apart=True))
        return prompter.render(chat, owner=_owner(job))

    async def _at_an_engine(self, job: Job, prompter: Prompter, why: NeedsEngine) -> Tokens | None:
        """Ask a replica, within a deadline; late or failing means unknown, never an error."""
        address = self._engine_address(job.model or "")
        if address is None or job.inbound.body is None or why.reason in ("field", "size"):
            return None
        if len(job.inbound.body) > _MAX_ENGINE_BYTES:
            return None
        if job.completion is not None and not _is_one_text(job.completion):
            return None  # `/tokenize` takes one text
        try:
            body = orjson.dumps(tokenize_body(orjson.loads(job.inbound.body)))
            ids = await self._engine_api.tokenize(
                *address, body, timeout_s=self._config.engine_timeout_s
            )
        except (BadRequest, orjson.JSONEncodeError):  # orjson writes 254 levels and reads 1,024
            return None  # forwarded, it will be refused in the engine's own words
        except UpstreamError as exc:
            logger.warning("no engine tokenized", extra={"model": job.model, "reason": exc.message})
            return None
        plan = prompter.plan_ids(ids, _owner(job))
        return prompter.commit(plan, plan.encode())

    # ---------------------------------------------------------------- continuations

    async def lengthen(
        self, job: Job, replica: str, transcript: Transcript, terms: Terms
    ) -> tuple[list[int], list[int]]:
        """Find the ids of a prompt and of all that `replica` generated from it.

        Raises:
            NotContinued: they are not known for sure.
        """
        prompter = self._prompters.get(job.model) if job.model is not None else None
        if prompter is None:
            raise NotContinued("tokens")
        try:
            if terms.returns_ids:
                if transcript.prompt_ids is None:
                    raise NotContinued("tokens")
                ids = transcript.ids
                if ids and not prompter.ends_in_text(ids):
                    raise NotContinued("text")
                return transcript.prompt_ids, ids.tolist()
            trust = prompter.trust  # the engines have counted as we count, and this one, too
            is_proven = trust.num_matches > 0 and not trust.disagrees(replica)
            if job.tokens is None or job.way != "local" or not is_proven:
                raise NotContinued("tokens")
            return await self._lengthen_by_text(prompter, job.tokens, transcript.text, terms)
        except NeedsEngine as exc:
            raise NotContinued("tokens") from exc

    async def _lengthen_by_text(
        self, prompter: Prompter, prompt: Tokens, text: str, terms: Terms
    ) -> tuple[list[int], list[int]]:
        prompt_ids = prompt.ids()
        encode = partial(
            prompter.encode_behind,
            prompt_ids,
            text,
            skip_special_tokens=terms.skips_special_tokens,
        )
        is_long = len(text) > self._config.inline_chars
        ids = await self._off_loop(encode) if is_long else encode()
        if ids is None:
            raise NotContinued("text")
        return prompt_ids, ids.tolist()

    def continued(self, job: Job, ids: list[int], num_generated: int, body: bytes) -> Job:
        """Make the job that goes on with a broken stream: `ids` are its prompt."""
        prompter = self._prompters.get(job.model or "")
        assert prompter is not None
        plan = prompter.plan_ids(ids, _owner(job))
        return replace(
            job,
            inbound=replace(job.inbound, body=body),
            tokens=prompter.commit(plan, plan.encode()),
            num_tokens=len(ids),
            way="continued",
            chains={},
            found={},
            is_continuation=True,
            num_continued_tokens=num_generated,
        )

    def _note_bug(self, job: Job, bug: Exception) -> None:
        """Log where it happened, but not what it says: that may quote the prompt."""
        where = traceback.extract_tb(bug.__traceback__, limit=-1)[0]
        logger.error(
            "a prompt was not tokenized",
            extra={
                "model": job.model,
                "request": job.request_id,
                "error": type(bug).__name__,
                "where": f"{where.filename}:{where.lineno}",
            },
        )

    async def _off_loop(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._encoders, work)

    async def _heavily(self, work: Callable[[], _T]) -> _T:
        """Do work of up to seconds beside, one at a time.

        Raises:
            NeedsEngine: too much of it waits already.
        """
        if self._num_heavy >= _MAX_HEAVY:
            raise NeedsEngine("size")
        self._num_heavy += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._heavy, work)
        finally:
            self._num_heavy -= 1

    # ---------------------------------------------------------------- proof

    def audit(self, job: Job, placement: Placement, num_engine_tokens: int) -> None:
        """Hold our count of a prompt against that of the replica it was sent to."""
        prompter = self._prompters.get(job.model) if job.model is not None else None
        if prompter is None or not (job.is_refused_here or job.way == "local"):
            return
        replica = placement.candidate.replica.name
        disagreed = prompter.trust.disagrees(replica)
        is_match = prompter.trust.observe_usage(
            replica,
            0 if job.is_refused_here else job.num_tokens,
            num_engine_tokens,
            num_replicas=placement.num_replicas,
            now_s=asyncio.get_running_loop().time(),
        )
        if job.is_refused_here:  # but not by the engine: our template is not the engine's
            self._mismatch(job, "template", prompter, replica, is_new=not disagreed)
            return
        self._num_requests += 1
        if not is_match:
            self._mismatch(job, "usage", prompter, replica, is_new=not disagreed)
        elif self._is_sampled() and not self._proof_runs:
            self._prove(job, prompter)

    def _is_sampled(self) -> bool:
        """Take every n-th request, the first among them, while proofs have had their share."""
        ratio = self._config.prove_ratio
        return (
            ratio > 0
            and (self._num_requests - 1) % max(1, round(1 / ratio)) == 0
            and asyncio.get_running_loop().time() >= self._next_proof_s
        )

    def _prove(self, job: Job, prompter: Prompter) -> None:
        """Encode the prompt whole, beside; one at a time, and no larger a share of the time.

        One of a hundred long prompts encoded whole is a fifth of the CPU of all of them: after a
        proof that took t there is none for t / ratio.
        """
        assert job.tokens is not None
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        self._proof_runs = True
        read = partial(_read_again, job.inbound.body or b"", is_chat=job.chat is not None)
        tokens = job.tokens
        proof = loop.run_in_executor(self._encoders, lambda: prompter.prove(read(), tokens))

        def note(done: asyncio.Future[bool]) -> None:
            self._proof_runs = False
            now_s = loop.time()
            self._next_proof_s = now_s + (now_s - started_s) * (1 / self._config.prove_ratio - 1)
            if done.cancelled() or done.exception() is not None:
                return  # distrusted meanwhile, or refused: no proof of anything
            if not prompter.trust.observe_proof(done.result(), now_s=now_s):
                self._mismatch(job, "full_encode", prompter)

        proof.add_done_callback(note)

    def _mismatch(
        self,
        job: Job,
        against: str,
        prompter: Prompter,
        replica: str | None = None,
        *,
        is_new: bool = True,
    ) -> None:
        """Count it; log who is not believed any more, once."""
        self._metrics.token_mismatches.labels(job.model or "", against).inc()
        said = {"model": job.model, "request": job.request_id, "replica": replica}
        reason = prompter.trust.reason
        if reason is not None:
            logger.error(
                "our tokens are not the engine's; the engine tokenizes for a while",
                extra={**said, "reason": reason},
            )
        elif is_new:
            logger.error("a replica counts other tokens; it alone is not believed", extra=said)


def _read_again(body: bytes, *, is_chat: bool) -> ChatRequest | CompletionRequest:
    """Parse a body that was read before and has been let go of since."""
    read = orjson.loads(body)
    return parse_chat(read) if is_chat else parse_completion(read)


def _owner(job: Job) -> str:
    """Name whose prompts a prompt is remembered with: those of the same tenant's cache."""
    return (job.tenant.salt or "") if job.tenant is not None else ""


def _num_chars(request: CompletionRequest) -> int:
    first = request.prompts[0] if request.prompts else ""
    return len(first) if isinstance(first, str) else 0


def _is_one_text(request: CompletionRequest) -> bool:
    return len(request.prompts) == 1 and isinstance(request.prompts[0], str)
