"""Everything goes wrong at once, under load, for minutes: `python -m loadtest.chaos`.

stack     the processes: two routers, Redis, a pool, four emulated replicas
link      a TCP proxy on each way between them, that can be cut, held, slowed
plan      what goes wrong when, drawn from a seed
faults    doing it, and undoing it
load      agents and hostile clients
answers   reading an answer; what the engine would have said undisturbed
ledger    what clients saw, request by request
watch     metrics, memory and descriptors of the routers while it runs
verdict   what must hold, and whether it did
"""
