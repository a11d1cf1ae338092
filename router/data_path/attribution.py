"""What candidates hold of a prompt whose tokens are not known, by what its session stored.

Sound, images of models that are not known here, models without a tokenizer. Engines name sessions
in their events, so the blocks of a session's last prompt are known (router.index.trails), and who
still has them. Where they are not, the session's last candidate is believed to have all of them:

    engines that name no session (before vLLM 0.32), or a client's own (`session_id` in its body)
    events that another router follows: it publishes blocks, not whose they are
    the first turn that this router sees; later turns whose usage contradicts the blocks

Nothing is claimed while such a request is computed, and no pool is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policies.view import CandidateId
from router.api.sessions import NAME_CHARS, engine_name
from router.api.usage import Usage
from router.data_path.job import Job
from router.index.cache_view import CacheView
from router.index.trails import Trail, digest_in
from router.replicas.fleet import NO_MATCH, Match
from router.replicas.replica import Candidate
from router.replicas.sessions import SessionView


class Attribution:
    """Follows the sessions of prompts that are not known to their end."""

    def __init__(self, caches: CacheView) -> None:
        self._caches = caches
        self._trails = caches.index.trails

    def estimate(self, job: Job) -> None:
        """Estimate a prompt's tokens by the last one's, which an engine has counted."""
        job.num_guessed_tokens = job.num_tokens
        trail = self._trail(job)
        if trail is not None and trail.num_prompt_tokens is not None:
            num_more = max(0, job.num_tokens - trail.num_guessed_tokens)
            job.num_tokens = trail.num_prompt_tokens + num_more

    def match(
        self,
        job: Job,
        session: SessionView | None,
        candidates: Sequence[Candidate],
        known: Mapping[CandidateId, Match],
    ) -> dict[CandidateId, Match]:
        """Count the leading tokens that candidates hold; `known`: of the part that is known.

        Sets which of them are more than a guess.
        """
        trail = self._trail(job)
        traced = self._traced(job, trail, candidates) if trail is not None else {}
        matches = dict(known)
        for candidate, num_tokens in traced.items():
            matches[candidate] = _at_least(matches.get(candidate, NO_MATCH), num_tokens)
        job.traced = frozenset(
            candidate
            for candidate, num_tokens in traced.items()
            if job.tokens is None or num_tokens > known.get(candidate, NO_MATCH).num_cpu_tokens
        )
        job.num_tokens = max(job.num_tokens, 1 + max(traced.values(), default=0))
        if session is not None and job.tokens is None:
            home = session.candidate
            if trail is None or home not in traced or home != trail.candidate:
                # The last prompt that it computed there is probably this one's beginning.
                num_tokens = max(0, min(session.num_tokens, job.num_tokens - 1))
                matches[home] = _at_least(matches.get(home, NO_MATCH), num_tokens)
                job.traced -= {home}
        return matches

    def admitted(self, job: Job) -> None:
        """Follow the session of a request that is about to be sent."""
        if job.engine_session is not None:
            name = digest_in(job.engine_session)
            if len(name) == NAME_CHARS:  # it may be another session's digest
                self._trails.follow(name).is_foreign = True
        elif job.session_hash is not None and job.prompt is not None and not job.is_known:
            if job.completion is None or len(job.completion.prompts) == 1:  # else of no one chain
                self._trails.follow(engine_name(job.session_hash))

    def answered(self, job: Job, usage: Usage) -> None:
        """Note what an engine says of a request that is over."""
        if job.session_hash is not None and job.prompt is not None and not job.is_known:
            self._trails.answered(
                engine_name(job.session_hash),
                num_prompt_tokens=usage.prompt_tokens,
                num_guessed_tokens=job.num_guessed_tokens,
                num_reply_tokens=usage.completion_tokens or 0,
                num_cached_tokens=usage.num_cached_tokens,
            )

    def _trail(self, job: Job) -> Trail | None:
        if job.session_hash is None or job.is_known or job.engine_session is not None:
            return None
        return self._trails.get(engine_name(job.session_hash))

    def _traced(
        self, job: Job, trail: Trail, candidates: Sequence[Candidate]
    ) -> Mapping[CandidateId, int]:
        """Count what candidates hold of a session's blocks, in tokens; none where that is unsure.

        Nowhere if what is known of the prompt is not the beginning of these blocks.
        """
        keys, num_before, size = trail.expected(), trail.num_before or 0, trail.block_size
        prompt, caches = job.prompt, self._caches
        if not keys or (prompt is not None and not prompt.reads_cache):
            return {}
        asked: list[CandidateId] = []
        for candidate in candidates:
            stream = caches.stream(candidate.id)
            if stream is None or stream.is_blind or not job.is_placed_at(candidate):
                continue
            contract = stream.contract
            if contract.block_size != size:
                continue
            if num_before and caches.index.has_groups(candidate.id):
                continue  # their hits depend on where a block is
            start = job.keys(contract)
            num_both = min(len(start), num_before + len(keys))
            if num_both > num_before and start[num_both - 1] != keys[num_both - 1 - num_before]:
                return {}
            asked.append(candidate.id)
        return {
            candidate: (num_before + found.num_gpu_blocks) * size if found.num_gpu_blocks else 0
            for candidate, found in caches.match(keys, asked).items()
        }


def _at_least(match: Match, num_tokens: int) -> Match:
    """Return a match that is as long at least."""
    return match._replace(
        num_gpu_tokens=max(match.num_gpu_tokens, num_tokens),
        num_cpu_tokens=max(match.num_cpu_tokens, num_tokens),
    )
