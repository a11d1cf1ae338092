"""Workloads made up: block ids, arrivals and waits, no text.

Every workload can be sent in open loop (`arrival_s`) and in closed loop (`after`, `wait_s`).
Sessions start as a Poisson process. In open loop their turns follow at the speed of an idle engine.
`agents` and `mixed` can keep a constant number of agents at work, in closed loop only.
"""

from typing import Final

from loadtest.generated.agents import Agents
from loadtest.generated.chats import Chats
from loadtest.generated.mixed import Mixed
from loadtest.generated.siblings import Siblings

Generator = Agents | Chats | Mixed | Siblings

GENERATORS: Final[dict[str, type[Generator]]] = {
    "agents": Agents,
    "chats": Chats,
    "mixed": Mixed,
    "siblings": Siblings,
}

__all__ = ["GENERATORS", "Agents", "Chats", "Generator", "Mixed", "Siblings"]
