"""`warmroute simulate`: a workload through a simulated fleet, placed by the live router's objects.

    workload -> simulation -> router (policy, fleet, index: the live ones) -> engine -> outcome

    setup           the fleet, and how fast the workload comes
    turns, events   which turn comes when; what happens next
    simulation      what happens to a turn, step by step
    router, stream  one live router's objects, and what it learns of an engine's cache
    other_routers   what routers learn of one another
    engine, blocks, pool
                    a replica's batch and cache; what all of them share
    ticket, tally, outcome
                    one turn on its way; every turn's result; their sum

Deterministic by seed; 64 replicas and 100,000 requests take minutes on one core.
"""

from loadtest.simulator.outcome import ReplicaUse, Simulated
from loadtest.simulator.setup import Halves, PoolSetup, Setup
from loadtest.simulator.simulation import simulate

__all__ = ["Halves", "PoolSetup", "ReplicaUse", "Setup", "Simulated", "simulate"]
