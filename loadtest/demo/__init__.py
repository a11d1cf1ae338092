"""`warmroute demo`: three emulated replicas, the router, a fleet of coding agents, three policies.

cli        options, signals, exit status: the story from start to end
workload   what the agents do, how large the caches are; and why
run        one policy as the demo sees it: a process, its turns as they end
stage      that process: replicas, router and agents in one event loop (`python -m loadtest.demo`)
virtual_time, memory_events
           what makes the loop independent of the machine
progress   bars while it runs;  report: verdict, table, words, JSON;  picture: PNG and SVG
"""
