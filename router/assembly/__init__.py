"""Builds a router's parts, by subject; router.run runs them.

parts      what is known, what connects to others                   `Parts`
discovery  what finds replicas and follows them                     `Discovery`
cluster    what is shared with other routers                        `Cluster`
ports      the public port and the admin port                       `build_listeners`
router     the steps of a request, and all of it                    `Router`
"""

from router.assembly.ports import build_listeners
from router.assembly.router import Router

__all__ = ["Router", "build_listeners"]
