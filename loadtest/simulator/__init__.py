"""`warmroute simulate`: a workload through a simulated fleet, placed by the live router's objects.

    workload -> simulation -> router (policy, fleet, index: the live ones) -> engine -> outcome

Deterministic by seed; 64 replicas and 100,000 requests take minutes on one core.
"""

from loadtest.simulator.outcome import ReplicaUse, Simulated
from loadtest.simulator.setup import Halves, PoolSetup, Setup
from loadtest.simulator.simulation import simulate

__all__ = ["Halves", "PoolSetup", "ReplicaUse", "Setup", "Simulated", "simulate"]
