"""Bursts in the simulator: kv_aware, no queue, session_hash, and an analytic oracle."""
import argparse, random, sys
from statistics import fmean, geometric_mean
from typing import ClassVar
import router.request.place as place_module
from policies.policy import Policy
from policies.view import Decision
from router.api.sessions import session_hash
from loadtest.simulator import Setup, simulate
from loadtest.workload import Turn, Workload
from loadtest.engine_model.time_model import PRESETS, StepWork
from loadtest.compare.arms import arm_of
from msgspec.structs import replace

SIZE = 32
def workload(seed, cells, gap, rep):
    dice = random.Random(f"{seed}/sim")
    ids = iter(range(1, 10**9))
    turns, bursts, t = [], [], 0.0
    warm = [(16, 6016, "new", 0.0)] * 3
    todo = [*cells] * rep
    dice.shuffle(todo)
    for number, cell in enumerate([*warm, *todo]):
        n, shared, kind, spread = cell
        if number == 3: t += 60
        common = [next(ids) for _ in range(shared // SIZE)]
        if kind == "parent":
            turns.append(Turn(session_id=f"{number}-p", number=0, arrival_s=t, num_input_tokens=shared + 8,
                              num_output_tokens=20, hash_ids=(*common, next(ids))))
            t += 0.3 * gap
        at = sorted(dice.uniform(0, spread) for _ in range(n)); at = [a - at[0] for a in at]
        own = [dice.randint(600, 1200) for _ in range(n)]
        for i in range(n):
            total = shared + own[i]
            turns.append(Turn(session_id=f"{number}-{i}", number=0, arrival_s=t + at[i], num_input_tokens=total,
                              num_output_tokens=20, hash_ids=(*common, *[next(ids) for _ in range(-(-own[i] // SIZE))])))
        bursts.append(dict(number=number, cell=cell, at=at, own=own))
        t += gap
    return Workload(name="bursts", block_size=SIZE, turns=tuple(turns)), bursts

def took(times, budget, start, end):
    out = 0.0
    while start < end:
        num = min(budget, end - start)
        out += times.step_s(StepWork(num_prefill_tokens=num, num_prefill_pairs=num * (start + num / 2)))
        start += num
    return out

def line(times, budget, burst, mine, cached, shared):
    """TTFTs of the siblings `mine` on one engine: shortest first, no preemption, full prefix reuse."""
    now, left, found = 0.0, set(mine), {}
    while left:
        ready = [i for i in left if burst["at"][i] <= now]
        if not ready:
            now = min(burst["at"][i] for i in left); continue
        i = min(ready, key=lambda i: burst["own"][i]); left.discard(i)
        now += took(times, budget, shared if cached else 0, shared + burst["own"][i]); cached = True
        found[i] = now - burst["at"][i]
    return found

def oracle(times, budget, burst, num_replicas, shared, held):
    """Best m: the first m arrivals open m replicas, the others go where they end first."""
    n, best = len(burst["own"]), None
    for m in range(1, min(num_replicas, n) + 1):
        for ratio in ({1.0} if not held else {1.0, 0.5}):
            free, has, where = [0.0] * m, [held and k == 0 for k in range(m)], []
            opened = 0
            for i in range(n):
                def end(k):
                    return max(free[k], burst["at"][i]) + took(times, budget, shared if has[k] else 0, shared + burst["own"][i])
                if not held and i < m: k = i
                elif held and opened < m - 1 and i >= 1: opened += 1; k = opened
                else: k = min(range(m), key=end)
                free[k] = end(k); has[k] = True; where.append(k)
            tt = {}
            for k in range(m):
                tt |= line(times, budget, burst, [i for i in range(n) if where[i] == k], held and k == 0, shared)
            mean = fmean(tt.values())
            if best is None or mean < best[0] - 1e-9:
                best = (mean, m, where, tt)
    return best

MAP = {}
class Fixed(Policy, frozen=True, kw_only=True):
    """Places each sibling as MAP says."""
    name: ClassVar[str] = "fixed"
    def decide(self, snapshot):
        k = MAP.get(snapshot.request.session_hash, 0)
        return Decision(candidate=snapshot.replicas[k % len(snapshot.replicas)].id, reason="fixed", costs=())

def forced(times, budget, burst, m, shared, held):
    """m replicas; the first arrivals open them, others go where they end first."""
    n = len(burst["own"])
    best = None
    for lead in ((1,) if not held else (1, 2, 3)):
        free, has, where, opened = [0.0] * m, [held and k == 0 for k in range(m)], [], 0
        for i in range(n):
            def end(k):
                return max(free[k], burst["at"][i]) + took(times, budget, shared if has[k] else 0, shared + burst["own"][i])
            if not held and i < m: k = i
            elif held and opened < m - 1 and i >= lead: opened += 1; k = opened
            else: k = min((k for k in range(m) if has[k]), key=end)
            free[k] = end(k); has[k] = True; where.append(k)
        if best is None or max(free) < best[0]: best = (max(free), where)
    return best[1]

def main():
    p = argparse.ArgumentParser()
    p.add_argument("--engine", default="cpu-slow"); p.add_argument("--replicas", type=int, default=2)
    p.add_argument("--batch", type=int, default=2048); p.add_argument("--blocks", type=int, default=1199)
    p.add_argument("--gap", type=float, default=30.0); p.add_argument("--rep", type=int, default=4)
    p.add_argument("--seeds", type=int, nargs="+", default=[1]); p.add_argument("--to-engine", type=float, default=0.02)
    p.add_argument("--lag", type=float, default=0.01)
    p.add_argument("--sizes", type=int, nargs="+", default=[4, 8, 16]); p.add_argument("--shared", type=int, nargs="+", default=[3008, 12000])
    p.add_argument("--spreads", type=float, nargs="+", default=[0.0, 0.3]); p.add_argument("--kinds", nargs="+", default=["new", "parent"])
    p.add_argument("--arms", nargs="+", default=["kv_aware", "kv_aware:queue.mode=off", "session_hash"])
    p.add_argument("--most", type=int, default=16); p.add_argument("--dump", action="store_true")
    p.add_argument('--gate', type=float, default=1.4); a = p.parse_args(); place_module.GATE = a.gate
    times = PRESETS[a.engine]
    cells = [(n, s, k, sp) for n in a.sizes for s in a.shared for k in a.kinds for sp in a.spreads]
    rows = {}
    for seed in a.seeds:
        work, bursts = workload(seed, cells, a.gap, a.rep)
        bursts = bursts[3:]
        most = min(a.replicas, max(a.sizes), a.most)
        for arm in [*a.arms, *(f"fixed{m}" for m in range(1, most + 1)), "oracle"]:
            if arm == "oracle":
                for b in bursts:
                    n, s, kind, _ = b["cell"]
                    mean, m, where, tt = oracle(times, a.batch, b, a.replicas, s, kind == "parent")
                    tot = sum(b["own"]) + s * (len(set(where)) - (kind == "parent"))
                    rows.setdefault(b["cell"], {}).setdefault(arm, []).append((mean + a.to_engine, max(tt.values()) + a.to_engine, tot, len(set(where)), 0))
                continue
            if arm.startswith("fixed"):
                m = int(arm[5:])
                for b in bursts:
                    n, s, kind, _ = b["cell"]
                    MAP[session_hash(f"{b['number']}-p", "simulated")] = 0
                    for i, k in enumerate(forced(times, a.batch, b, min(m, n), s, kind == "parent")):
                        MAP[session_hash(f"{b['number']}-{i}", "simulated")] = k
                for w in range(3):
                    for i in range(16): MAP[session_hash(f"{w}-{i}", "simulated")] = i % a.replicas
                one = arm_of("kv_aware"); policy = Fixed()
            elif arm.startswith("announced"):
                # announcedFACTOR[t|e|]: rest of the arrivals by truth, by estimate, or not subtracted
                head, _, params = arm.partition(":")
                factor, how = float(head[9:-1]), head[-1]
                one = arm_of("kv_aware" + (":" + params if params else "")); policy = one.make_policy()
                left = {}
                for b in bursts:
                    n = len(b["own"])
                    for i in range(n):
                        now, last = b["at"][i], b["at"][-1]
                        rest = {"t": last - now, "e": (now / i if i else 0.0) * (n - 1 - i), "n": 0.0}[how]
                        left[session_hash(f"{b['number']}-{i}", "simulated")] = (n - 1 - i, 1e3 * rest, factor)
                place_module.EXPECTED = lambda prompt: left.get(prompt.read.session_hash, (0, 0, 0))
            else:
                one = arm_of(arm); policy = one.make_policy()
            setup = Setup(num_replicas=a.replicas, num_blocks=a.blocks, engine=a.engine, max_num_batched_tokens=a.batch,
                          max_num_seqs=128, load=None, loop="open", to_engine_s=a.to_engine, event_lag_s=a.lag, queue=one.queue_rules(), seed=seed)
            found = simulate(work, policy, setup, label=arm); place_module.EXPECTED = None
            by = {}
            for t in found.run.turns: by.setdefault(t.session_id.split("-")[0], {})[t.session_id.split("-")[1]] = t
            for b in bursts:
                got = by[str(b["number"])]; s = b["cell"][1]
                sib = [got[str(i)] for i in range(b["cell"][0])]
                miss = {}
                for t in sib: miss[t.replica] = miss.get(t.replica, 0) + max(0, s - (t.num_cached_tokens or 0))
                again = sum(max(0, v - s) for v in miss.values())  # computed more than once at a replica
                rows.setdefault(b["cell"], {}).setdefault(arm, []).append((fmean(t.ttft_s for t in sib), max(t.ttft_s for t in sib),
                    sum(t.num_recomputed_tokens for t in sib), sum(v > 0 for v in miss.values()), again))
                if a.dump: print(arm, b["cell"], [(t.replica, round(t.ttft_s, 2), t.num_cached_tokens) for t in sib])
    arms = [*a.arms, "best", "oracle"]
    for cell in cells:
        r = rows[cell]; fixed = [r[x] for x in r if x.startswith("fixed")]
        r["best"] = [min(each, key=lambda t: t[0]) for each in zip(*fixed)]
    print("cell | " + " | ".join(f"{x}: mean longest tokens copies again" for x in arms))
    for cell in cells:
        print(cell, "|", " | ".join("{:.3f} {:.3f} {:7.0f} {:.1f} {:.0f}".format(*(fmean(c) for c in zip(*rows[cell][x]))) for x in arms))
    print("geo ratio to oracle:", {x: [round(fmean(fmean(r[0] for r in rows[c][x]) / fmean(r[0] for r in rows[c]["oracle"]) for c in cells), 3)] for x in arms})
    print("ratio to best, mean TTFT; tokens:")
    for cell in cells:
        b = rows[cell]["best"]
        if all(fmean(t[0] for t in rows[cell][x]) == fmean(t[0] for t in rows[cell]["kv_aware"]) for x in a.arms): continue
        print(cell, {x: (round(fmean(t[0] for t in rows[cell][x]) / fmean(t[0] for t in b), 3), round(fmean(t[2] for t in rows[cell][x]) / fmean(t[2] for t in b), 3)) for x in arms if x != "best"})
    for x in a.arms:
        print("geo", x, *(round(geometric_mean([fmean(t[j] for t in rows[c][x]) / fmean(t[j] for t in rows[c]["best"]) for c in cells]), 3) for j in range(3)))
main()
