import json, sys
from statistics import fmean
rows = [json.loads(l) for l in open(sys.argv[1])]
arms = list(dict.fromkeys(r["arm"] for r in rows))
def key(r): return (r["seed"], r["number"])
by = {a: {key(r): r for r in rows if r["arm"] == a} for a in arms}
def line(name, keep):
    out = []
    for a in arms:
        common = [k for k in by[arms[0]] if k in by[a] and keep(by[a][k])]
        if not common: out.append("-"); continue
        mine, base = [by[a][k] for k in common], [by[arms[0]][k] for k in common]
        again = sum(max(0, v - r["shared"]) for r in mine for v in r["shared_computed"].values())
        copies = fmean(sum(v > 0 for v in r["shared_computed"].values()) for r in mine)
        m = fmean(fmean(r["ttft"]) for r in mine); mb = fmean(fmean(r["ttft"]) for r in base)
        out.append(f"{len(mine)}: mean {m:.2f} ({m/mb:.2f}) longest {fmean(max(r['ttft']) for r in mine):.2f} ({fmean(max(r['ttft']) for r in mine)/fmean(max(r['ttft']) for r in base):.2f}) span {fmean(r['makespan'] for r in mine):.2f} tok {sum(r['computed'] for r in mine)} ({sum(r['computed'] for r in mine)/sum(r['computed'] for r in base):.2f}) copies {copies:.2f} again {again}")
    print(name); [print("   ", a, o) for a, o in zip(arms, out)]
line("all", lambda r: True)
for kind in ("new", "parent"):
    line(kind, lambda r: r["cell"][2] == kind)
    for s in sorted({r["shared"] for r in rows}): line(f"{kind} {s}", lambda r: r["cell"][2] == kind and r["shared"] == s)
for n in (4, 8, 16): line(f"n {n}", lambda r: r["n"] == n)
for n in (4, 8, 16):
    for s in sorted({r["shared"] for r in rows}): line(f"parent n {n} {s}", lambda r: r["n"] == n and r["cell"][2] == "parent" and r["shared"] == s)
