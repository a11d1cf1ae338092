"""`warmroute simulate`: a workload through a simulated fleet, placed by the live router's objects.

    workload -> simulation -> router (policy, fleet, index: the live ones) -> engine -> outcome

    setup           the fleet, and the pace of the workload
    turns, events   when each turn comes; what happens next
    simulation      the steps of a turn
    router, stream  one live router's objects, and its view of an engine's cache
    place           decisions, and what they book: the seam to `router.request`
    other_routers   what routers learn of one another
    engine, reads   a replica in virtual time (`loadtest.engine_model`); its reads from elsewhere
    ticket, tally, outcome
                    one turn in the fleet; every turn's result; their sum

Deterministic by seed; 64 replicas and 100,000 requests take minutes on one core.
"""

from loadtest.simulator.outcome import ReplicaUse, Simulated
from loadtest.simulator.setup import Halves, PoolSetup, Setup, TierSetup
from loadtest.simulator.simulation import simulate

__all__ = ["Halves", "PoolSetup", "ReplicaUse", "Setup", "Simulated", "TierSetup", "simulate"]
