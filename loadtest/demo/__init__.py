"""`warmroute demo`: three emulated replicas, the router, a fleet of coding agents, three policies.

cli        options, signals, exit status: the story from start to end
workload   what the agents do, how large the caches are, how fast the clock runs; and why
stack      the processes of one run: replicas, router; `children` and `leash` keep them
run        one policy from cold caches to the last turn; what was measured
compare    differences with their spread;  report: table, words, JSON;  picture: PNG and SVG
"""
