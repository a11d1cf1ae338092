"""Bursts of sub-agents on two real engines with slow prefill: a prototype study.

    python -m loadtest.studies.fanout --seeds 101 --out x.jsonl
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import fmean
from time import monotonic

import orjson

from loadtest.engine_model.time_model import PRESETS
from loadtest.engines.vllm import BLOCK_SIZE
from loadtest.runner import sending
from loadtest.runner.exchange import Exchange
from loadtest.runner.requests import COMPLETIONS
from loadtest.studies.pair import SESSION_HEADER, Arm, running

TOKENS = range(300, 8_000)
ORACLE = "oracle"
PARENT_HEADER = "x-parent-session-id"


def draw(seed, args):
    """Bursts: warm-ups, then every cell, shuffled."""
    dice = random.Random(f"{seed}/fanout")

    def tokens(num):
        return [dice.choice(TOKENS) for _ in range(num)]

    def burst(cell):
        num, shared, kind, spread = cell
        lengths = [dice.randint(600, 1_200) for _ in range(num)]
        at = sorted(dice.uniform(0.0, spread) for _ in range(num))
        at = [each - at[0] for each in at]
        common = tokens(shared)
        return {"cell": cell, "shared": common, "own": [tokens(each) for each in lengths], "at": at}

    cells = [
        (num, shared, kind, spread)
        for num in args.sizes
        for shared in args.shared
        for kind in args.kinds
        for spread in args.spreads
    ] * args.repeat
    dice.shuffle(cells)
    warm = [burst((n, 3_000, "new", 0.0)) for n in (8, 8, 4)]
    return warm, [burst(each) for each in cells]


class Model:
    """Time of an engine's compute while both compute."""

    def __init__(self, base_s, per_token_s, per_pair_s):
        self.base_s, self.per_token_s, self.per_pair_s = base_s, per_token_s, per_pair_s

    def took(self, start, end):
        pairs = (end * end - start * start) / 2
        return self.base_s + self.per_token_s * (end - start) + self.per_pair_s * pairs

    def plan(self, burst, at_a, at_b):
        """The split with the least mean TTFT: where each sibling goes."""
        num, shared = len(burst["own"]), len(burst["shared"])
        best = None
        for k in range(num):
            where = [0] * num
            for j in range(k):
                where[1 + (j * (num - 1)) // k] = 1
            total = 0.0
            for side, has in ((0, at_a), (1, at_b)):
                mine = [i for i in range(num) if where[i] == side]
                now, cached, left = 0.0, has, set(mine)
                while left:
                    ready = [i for i in left if burst["at"][i] <= now]
                    if not ready:
                        now = min(burst["at"][i] for i in left)
                        continue
                    i = min(ready, key=lambda i: len(burst["own"][i]))
                    left.discard(i)
                    now += self.took(shared if cached else 0, shared + len(burst["own"][i]))
                    cached = True
                    total += now - burst["at"][i]
            if best is None or total < best[0]:
                best = (total, where)
        return best[0] / num, best[1]


async def ask(client, prompt, session, parent=None, on_first=None, num_out=20, left=None):
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": num_out, "ignore_eos": True,
        "temperature": 0, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    exchange = Exchange(session, 0, start_s=monotonic())
    headers = {SESSION_HEADER: session}
    if parent:
        headers[PARENT_HEADER] = parent
    if left is not None:
        headers["x-fanout-left"] = left
    if on_first is not None:
        receive = exchange.receive

        class Seen:
            def __getattr__(self, name):
                return getattr(exchange, name)

            def receive(self, piece, now_s):
                on_first()
                receive(piece, now_s)

        seen = Seen()
    else:
        seen = exchange
    await sending.send(client, COMPLETIONS, orjson.dumps(body), seen, monotonic, headers=headers)
    result = exchange.result(monotonic())
    if result.error is not None:
        raise RuntimeError(f"{result.error}: {result.error_message}")
    return result


async def one_burst(clients, burst, name, model, parent_at, factor=None):
    """Send a burst; through one client, or as the oracle has it."""
    start = monotonic()
    num = len(burst["own"])
    prompts = [burst["shared"] + each for each in burst["own"]]
    parent = f"{name}-parent" if burst["cell"][2] == "parent" else None
    if len(clients) == 1:
        async def go(i):
            await asyncio.sleep(start + burst["at"][i] - monotonic())
            due = monotonic()
            left = None
            if factor is not None:
                left = f"{num - 1 - i},{1e3 * (burst['at'][-1] - burst['at'][i]):.0f},{factor}"
            found = await ask(clients[0], prompts[i], f"{name}-{i}", parent, left=left)
            return i, due, monotonic() - due, found, found.replica
    else:
        flip = parent_at == 1
        _, where = model.plan(burst, parent_at is not None, False)
        arrived = [asyncio.Event() for _ in range(num)]
        places = [clients[w ^ flip] for w in where]
        lines = ([], [])
        busy = [0, 0]
        wake = [asyncio.Event(), asyncio.Event()]

        def pump(side):
            while lines[side] and busy[side] < 2:
                i = min(lines[side], key=lambda i: len(burst["own"][i]))
                lines[side].remove(i)
                busy[side] += 1
                arrived[i].set()

        async def go(i):
            await asyncio.sleep(start + burst["at"][i] - monotonic())
            due = monotonic()
            side = where[i]
            lines[side].append(i)
            pump(side)
            await arrived[i].wait()
            waited = monotonic() - due
            is_first = True

            def first():
                nonlocal is_first
                if is_first:
                    is_first = False
                    busy[side] -= 1
                    pump(side)

            found = await ask(places[i], prompts[i], f"{name}-{i}", parent, first)
            found = type(found)(**{**{f: getattr(found, f) for f in found.__struct_fields__},
                                   "ttft_s": found.ttft_s + waited})
            return i, due, monotonic() - due, found, f"r{where[i] ^ flip}"
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(go(i)) for i in range(num)]
    rows = sorted(each.result() for each in tasks)
    shared = len(burst["shared"]) // BLOCK_SIZE * BLOCK_SIZE
    per = {}
    for i, _, _, found, where_ in rows:
        miss = max(0, shared - (found.num_cached_tokens or 0))
        per[where_] = per.get(where_, 0) + miss
    ttfts = [found.ttft_s for *_, found, _ in rows]
    return {
        "cell": list(burst["cell"]), "n": num,
        "ttft": [round(each, 4) for each in ttfts],
        "makespan": max(due + total for _, due, total, _, _ in rows) - start,
        "computed": sum(f.num_prompt_tokens - f.num_cached_tokens for *_, f, _ in rows),
        "once": shared + sum(len(o) for o in burst["own"]),
        "shared": shared, "shared_computed": per,
        "where": [w for *_, w in rows], "start": [round(d - start, 3) for _, d, *_ in rows],
    }  # fmt: skip


async def send(pair, label, seed, warm, bursts, model, pause_s):
    names = [e.url for e in pair.engines]
    found = []

    @asynccontextmanager
    async def in_front():
        if label == ORACLE:
            for engine in pair.engines:
                engine.reset_prefix_cache()
                engine.complete([300])
            async with (
                sending.make_client(timeout_s=120, base_url=names[0]) as a,
                sending.make_client(timeout_s=120, base_url=names[1]) as b,
            ):
                yield [a, b]
        else:
            async with (
                pair.in_front(Arm(label=label.split("@")[0])) as url,
                sending.make_client(timeout_s=120, base_url=url) as client,
            ):
                yield [client]

    async with in_front() as clients:
        for number, burst in enumerate([*warm, *bursts]):
            if number == len(warm):
                await asyncio.sleep(pause_s)
            name = f"{label}-{seed}-{number}"
            parent_at = None
            if burst["cell"][2] == "parent":
                at = number % 2 if len(clients) == 2 else 0
                await ask(clients[at], burst["shared"], f"{name}-parent")
                parent_at = at
                await asyncio.sleep(0.1)
            factor = float(label.split("@")[1]) if "@" in label else None
            row = await one_burst(clients, burst, name, model, parent_at, factor)
            if number >= len(warm):
                found.append({"arm": label, "seed": seed, "number": number, **row})
                OUT.write(json.dumps(found[-1]) + "\n")
                OUT.flush()
            await asyncio.sleep(0.15)
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--arms", nargs="+", default=["kv_aware", "kv_aware:queue.mode=off", "session_hash", ORACLE])
    parser.add_argument("--seeds", nargs="+", type=int, default=[101])
    parser.add_argument("--sizes", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--shared", nargs="+", type=int, default=[3_000, 12_000])
    parser.add_argument("--kinds", nargs="+", default=["new", "parent"])
    parser.add_argument("--spreads", nargs="+", type=float, default=[0.0, 0.3])
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--pause", type=float, default=17.0)
    parser.add_argument("--prefill", default="slow")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    global OUT
    OUT = open(args.out, "a")
    with (
        tempfile.TemporaryDirectory(prefix="fanout-") as folder,
        running(Path(folder), has_pool=False, prefill=args.prefill) as pair,
    ):
        times = PRESETS["cpu-slow" if args.prefill == "slow" else "cpu-tiny"].slower(pair.pace)
        print("pace", round(pair.pace, 2), file=sys.stderr, flush=True)
        model = Model(1e-3 * times.base_ms, 1e-3 * times.ms_per_prefill_token, 1e-9 * times.ms_per_mtoken2)
        for round_, seed in enumerate(args.seeds):
            warm, bursts = draw(seed, args)
            for label in args.arms if round_ % 2 == 0 else [*args.arms[:2][::-1], *args.arms[2:]]:
                start = monotonic()
                asyncio.run(send(pair, label, seed, warm, bursts, model, args.pause))
                print(seed, label, round(monotonic() - start, 1), "s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
