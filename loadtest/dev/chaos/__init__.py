"""Break everything at once, under load, for minutes: `python -m loadtest.dev.chaos`.

    stack     the processes: two routers, Redis, a pool, four emulated replicas
    link      a TCP proxy on each connection between them, which can be cut, held or slowed
    surroundings
              the clock of a router
    plan      the faults and their times, drawn from a seed
    faults    how each fault is made and ended
    load      agents and hostile clients
    answers   reads an answer, and computes the right one
    ledger    the outcome of every request
    watch     metrics, memory and descriptors of the routers
    verdict   the promises, and whether they held

The verdict of a run goes to `chaos-out/`.
"""
