"""Compare warmroute with other routers, for docs/research/comparison.md.

    contestants    the routers, and how each is installed and started
    front          one router, running
    cost           the time and CPU that each adds, by size of the body
    placing        the tokens that each computes on real engines
    aiperf         whole sessions of NVIDIA's AIPerf, on real engines
    collapse       sessions beyond what the caches hold
    page           the JSON file and the tables

`python -m loadtest.dev.peers` measures them.
"""
