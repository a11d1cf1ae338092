"""Compare warmroute with other routers, for docs/research/comparison.md.

    contestants    the routers, and how each is installed and started
    front          one router, running
    cost           the time and CPU that each adds, by size of the body
    placing        the tokens that each computes on real engines
    page           the JSON file and the tables

`python -m loadtest.dev.peers` measures them.
"""
