"""Workloads made up: block ids, arrivals and waits, no text.

Every workload can be sent in open loop (`arrival_s`) and in closed loop (`after`, `wait_s`).
Sessions start as a Poisson process. In open loop their turns follow at the speed of an idle engine.
"""

from typing import Final

from loadtest.generated.agents import Agents
from loadtest.generated.shared import Shared
from loadtest.generated.siblings import Siblings
from loadtest.generated.zipf import Zipf

Generator = Agents | Siblings | Shared | Zipf

GENERATORS: Final[dict[str, type[Generator]]] = {
    "agents": Agents,
    "siblings": Siblings,
    "shared": Shared,
    "zipf": Zipf,
}

__all__ = ["GENERATORS", "Agents", "Generator", "Shared", "Siblings", "Zipf"]
