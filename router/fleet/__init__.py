"""The fleet: replicas, their load, their health, their speed, and the sessions that use them.

State, synchronous; `now_s` is an argument; no I/O. `fleet.Fleet` is the way in.
"""
