"""The replica behind the HTTP routes: ranks, tokenizer, replies; start, sleep and stop.

What must live here: building ranks, choosing one, starting a generation. What must not: HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from loadtest.emulator.engine import Engine, TierReads
from loadtest.emulator.events import EventPublisher, PublisherOptions
from loadtest.emulator.faults import Faults
from loadtest.emulator.generation import Generation
from loadtest.emulator.metrics import EngineMetrics, RankStats
from loadtest.emulator.options import EmulatorOptions
from loadtest.emulator.pool_client import PoolClient
from loadtest.emulator.replies import Reply, ReplyRules, ReplyWriter, sample
from loadtest.emulator.script import Script
from loadtest.emulator.tokens import ChatTokenizer, EncodePlan, Prompt, chain
from loadtest.emulator.transfers import Transfers
from loadtest.emulator.wire import ApiError, GenerationParams
from loadtest.engine_model.blocks import Blocks, KvSequence
from loadtest.engine_model.cpu_tier import CpuTier
from loadtest.engine_model.scheduler import Scheduler
from loadtest.engine_model.window_blocks import WindowBlocks
from router.base.contracts import NO_EXTRA, ExtraKeys

MAX_CHARS_ON_LOOP: Final = 30_000
"""Tokenizing more than this (about 10 ms) leaves the event loop."""


class Rank:
    """One data-parallel rank: engine, publisher, counters."""

    def __init__(self, engine: Engine, publisher: EventPublisher | None) -> None:
        self.engine = engine
        self.publisher = publisher
        self.stats = RankStats()

    @property
    def load(self) -> int:
        """Weigh its requests as vLLM's own balancer does: a waiting one counts four."""
        scheduler = self.engine.scheduler
        return 4 * len(scheduler.waiting) + len(scheduler.running)


class Replica:
    """All of one emulated engine but its sockets for HTTP."""

    def __init__(
        self, options: EmulatorOptions, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.options = options
        self.max_model_len = options.model_len()
        self.created = int(time.time())
        self.clock = clock
        self.tokenizer = ChatTokenizer(options.model_dir)
        self.writer = ReplyWriter(self.tokenizer, options.seed)
        self.script = Script.load(options.script) if options.script is not None else None
        self.faults = Faults(options.seed)
        self.loras = {name: (i, path) for i, (name, path) in enumerate(options.loras, 1)}
        self._num_loras = len(self.loras)
        self.models = [*options.served_model_names, *self.loras]
        self.num_in_flight = 0
        self.pool: PoolClient | None = None
        if options.pool is not None:
            self.pool = PoolClient(
                options.pool, options.model_dir.name, ms_per_token=options.ms_per_fetched_token
            )
        self.sleep_level: int | None = None
        self._is_held = False  # by /pause
        self._awake = asyncio.Event()
        self._awake.set()
        self.transfers = Transfers(options.connector, options.kv_role, options.data_parallel_size)
        self.ranks: list[Rank] = []
        self.metrics: EngineMetrics

    def start(self, bound_ports: list[tuple[int, int]] | None = None) -> None:
        """Build fresh ranks; `bound_ports` keeps the event ports of an earlier life.

        Raises:
            zmq.ZMQError: An event port is taken.
        """
        self.ranks = []
        for rank in range(self.options.data_parallel_size):
            try:
                self.ranks.append(self._build_rank(rank, bound_ports))
            except BaseException:
                self.stop()
                raise
        self.metrics = EngineMetrics(
            self.options,
            [(rank.engine, rank.stats) for rank in self.ranks],
            sleep_level=lambda: self.sleep_level,
        )

    def stop(self) -> list[tuple[int, int]]:
        """End all ranks at once: requests fail, sockets close. Return the event ports."""
        ports: list[tuple[int, int]] = []
        for rank in self.ranks:
            rank.engine.fail_all()
            if rank.publisher is not None:
                ports.append(rank.publisher.ports)
                rank.publisher.close()
        return ports

    def choose(self, header: str | None) -> Rank:
        """Pick the rank a header names, or the least loaded one.

        Raises:
            ApiError: The header names a rank that does not exist.
        """
        if header is not None and header.isdecimal():
            number = int(header)
            if number >= len(self.ranks):
                raise ApiError(
                    400,
                    f"data_parallel_rank {number} is out of range [0, {len(self.ranks)}).",
                )
            return self.ranks[number]
        return min(self.ranks, key=lambda rank: rank.load)

    async def encode(self, text: str) -> Prompt:
        """Tokenize a text; a long new one in a thread."""
        plan: EncodePlan = self.tokenizer.plan(text)
        if plan.num_new_chars > MAX_CHARS_ON_LOOP:
            await asyncio.to_thread(plan.encode)
        else:
            plan.encode()
        return self.tokenizer.commit(plan)

    def reply(
        self,
        prompt_ids: list[int],
        params: GenerationParams,
        body: Mapping[str, Any],
        *,
        index: int = 0,
    ) -> Reply:
        """Decide what the model says to a prompt; each `index` of several replies differs.

        Raises:
            ApiError: The script calls a function that the request does not have.
        """
        extension = params.extension
        room = self.max_model_len - len(prompt_ids)
        rules = ReplyRules(
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            min_tokens=params.min_tokens,
            ignore_eos=params.ignore_eos,
            stop=params.stop,
            natural_tokens=int(extension.get("reply_tokens", self.options.reply_tokens)),
        )
        dice = self.writer.dice(prompt_ids, params.seed)
        for _ in range(index):
            dice.seed(dice.getrandbits(64))
        step = self.script.step(body) if self.script is not None else None
        if step is not None and step.text is not None:
            return self.writer.echo(step.text, rules)
        if step is not None and step.call is not None:
            return self.writer.tool_call(dice, step.call, step.arguments, rules)
        function = self._called_function(body, params, dice.random())
        if function is not None:
            arguments = sample(function.get("parameters"), dice)
            return self.writer.tool_call(dice, str(function.get("name", "")), arguments, rules)
        if extension.get("echo") or self.options.reply == "echo":
            return self.writer.echo(_last_user_text(body), rules)
        return self.writer.words(dice, rules)

    def generation(
        self,
        prompt: Prompt,
        reply: Reply,
        ready: asyncio.Event,
        *,
        lora: str | None,
        cache_salt: str | None,
    ) -> Generation:
        """Make the request of one reply."""
        keys = self._keys(prompt, lora, cache_salt)
        token_ids = [*prompt.ids, *reply.ids]
        if self.options.enable_prefix_caching:
            rest = token_ids[len(keys) * self.options.block_size :]
            extra = self._extra(lora, cache_salt)
            keys += self.options.contract().digests(keys[-1] if keys else None, rest, extra)
        return Generation(
            token_ids,
            keys,
            len(prompt.ids),
            ready,
            lora=None if lora is None else (self.loras[lora][0], lora),
            cache_salt=cache_salt,
            arrival_s=self.clock(),
        )

    async def fetch(
        self, rank: Rank, prompt: Prompt, *, lora: str | None, cache_salt: str | None
    ) -> int:
        """Fetch from the pool what the rank lacks; return the leading tokens that it has then."""
        await self._awake.wait()
        if self.pool is None or not self.options.enable_prefix_caching:
            return 0
        keys = self._keys(prompt, lora, cache_salt)
        size = self.options.block_size
        eagle = self.options.eagle
        reusable = keys[: (len(prompt.ids) - (0 if eagle else 1)) // size]
        num_pooled = max(0, await self.pool.leading(reusable) - eagle)
        num_own = len(rank.engine.blocks.match(KvSequence(keys, len(prompt.ids))))
        if num_pooled <= num_own:
            return 0
        await asyncio.sleep(self.pool.fetch_s((num_pooled - num_own) * size) / self.options.speed)
        return num_pooled * size

    def load_lora(self, name: str, path: str, *, in_place: bool) -> bool:
        """Load an adapter; False if there is one of that name. The cache stays as it is."""
        known = self.loras.get(name)
        if known is not None and not in_place:
            return False
        if known is None:
            self._num_loras += 1
            self.models.append(name)
        self.loras[name] = (known[0] if known is not None else self._num_loras, path)
        return True

    def unload_lora(self, name: str) -> bool:
        """Unload an adapter; False if there is none of that name."""
        if self.loras.pop(name, None) is None:
            return False
        self.models.remove(name)
        return True

    async def sleep(self, level: int) -> None:
        """Stop computing; requests wait until `wake_up`. From level 1 on all caches are lost.

        Source: EngineCore.sleep and _reset_caches in vllm/v1/engine/core.py, 0.32.0.
        """
        self.sleep_level = level
        self._awake.clear()
        if level >= 1:
            await self._lose()

    def wake_up(self) -> None:
        """Go on."""
        self.sleep_level = None
        self._go_on()

    async def pause(self, *, loses_cache: bool) -> None:
        """Stop computing new requests; running ones go on to their end, in every mode.

        Source: pause_generation in vllm/v1/engine/async_llm.py, 0.32.0; vLLM aborts, awaits or
        keeps running requests.
        """
        self._is_held = True
        self._awake.clear()
        if loses_cache:
            await self._lose()

    def resume(self) -> None:
        """Go on after a pause; a replica that sleeps sleeps on."""
        self._is_held = False
        self._go_on()

    @property
    def is_paused(self) -> bool:
        """Whether no new request is computed, for whatever reason."""
        return not self._awake.is_set()

    def _go_on(self) -> None:
        if self.sleep_level is None and not self._is_held:
            self._awake.set()

    async def _lose(self) -> None:
        """Drop everything cached; the pool, too, for all its replicas."""
        self.reset_prefix_cache(preempt=True, with_tier=True)
        if self.pool is not None:
            await self.pool.remove_all()

    def reset_prefix_cache(self, *, preempt: bool, with_tier: bool = False) -> bool:
        """Clear the cache of every rank; False if one of them is in use."""
        results = [
            rank.engine.scheduler.reset_prefix_cache(preempt=preempt, with_tier=with_tier)
            for rank in self.ranks
        ]
        return all(results)

    def _keys(self, prompt: Prompt, lora: str | None, cache_salt: str | None) -> list[bytes]:
        """Name the full blocks of a prompt; none if caching is off."""
        if not self.options.enable_prefix_caching:
            return []
        return chain(prompt, self.options.contract(), self._extra(lora, cache_salt))

    def _extra(self, lora: str | None, cache_salt: str | None) -> ExtraKeys:
        if lora is None and cache_salt is None:
            return NO_EXTRA
        adapter = None if lora is None else (lora, self.loras[lora][1])
        return ExtraKeys(lora=adapter, cache_salt=cache_salt)

    def _build_rank(self, number: int, bound_ports: list[tuple[int, int]] | None) -> Rank:
        options = self.options
        blocks = self._build_blocks()
        tier = reads = None
        if options.cpu_blocks:
            tier = CpuTier(options.cpu_blocks, options.block_size, notes_changes=options.events)
            reads = TierReads(options.ms_per_cpu_token * 1e-3 / options.speed)
        scheduler = Scheduler(
            blocks,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
            loader=reads,
            tier=tier,
        )
        publisher = self._build_publisher(number, bound_ports) if options.events else None
        engine = Engine(
            blocks,
            scheduler,
            options.time_model,
            speed=options.speed,
            tick_s=options.tick_ms * 1e-3,
            publisher=publisher,
            pool=self.pool if options.kv_role != "consumer" else None,
            tier=tier,
            reads=reads,
            clock=self.clock,
        )
        return Rank(engine, publisher)

    def _build_blocks(self) -> Blocks:
        options = self.options
        if options.sliding_window is None:
            return Blocks(
                options.num_gpu_blocks,
                options.block_size,
                eagle=options.eagle,
                lookahead=options.lookahead,
                notes_changes=options.events,
            )
        return WindowBlocks(
            options.num_gpu_blocks,
            options.block_size,
            window=options.sliding_window,
            num_windows=options.num_window_groups,
            notes_changes=options.events,
        )

    def _build_publisher(
        self, number: int, bound_ports: list[tuple[int, int]] | None
    ) -> EventPublisher:
        options = self.options
        if bound_ports is not None:
            port, replay_port = bound_ports[number]
        else:
            port = options.events_port and options.events_port + number
            replay_port = options.replay_port and options.replay_port + number
        ports = PublisherOptions(
            host=options.host,
            port=port,
            replay_port=replay_port,
            buffer_steps=options.buffer_steps,
        )
        return EventPublisher(ports, options.first_rank + number)

    def _called_function(
        self, body: Mapping[str, Any], params: GenerationParams, roll: float
    ) -> Mapping[str, Any] | None:
        """Pick the function the reply calls: forced, asked for, or by chance; None: none."""
        tools = body.get("tools")
        choice = body.get("tool_choice")
        if not tools or choice == "none":
            return None
        functions: list[Mapping[str, Any]] = [tool["function"] for tool in tools]
        if isinstance(choice, Mapping):
            wanted = (choice.get("function") or {}).get("name")
            return next((f for f in functions if f.get("name") == wanted), None)
        asked = params.extension.get("tool_call")
        if choice == "required" or asked is True or isinstance(asked, str):
            named = [f for f in functions if f.get("name") == asked]
            return (named or functions)[0]
        if asked is None and roll < self.options.tool_call_ratio:
            return functions[int(roll / self.options.tool_call_ratio * len(functions))]
        return None


def _last_user_text(body: Mapping[str, Any]) -> str:
    for message in reversed(body.get("messages") or ()):
        if message.get("role") in ("user", "tool") and isinstance(message.get("content"), str):
            return str(message["content"])
    prompt = body.get("prompt")
    return prompt if isinstance(prompt, str) else ""
