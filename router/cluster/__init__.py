"""The way of shared state, beside the requests: what this router tells Redis, and what it hears.

    link      is Redis there? connect, try again, say so                    `Link`
    feeds     who feeds each candidate's blocks: we, another router         `Feed`
    reader    the log and the work stream, as they come                     `read`
    writer    what changed in our part of the index, and what is in flight  `write`, `tell`
    keeper    leases, heartbeats, sweeping                                   `keep`
    loader    snapshots, in the background                                   `load`
    pool      who lists the shared pool, and what was learned of it          `PoolShare`

`Sharing` puts them together; the replicas' watches ask it how to follow a candidate (`follow`).
No request waits for any of it, and none fails because of it: what goes wrong with Redis is counted,
logged once, and every router goes on with its own view.
"""

from router.cluster.leadership import Feed, Role
from router.cluster.link import Link
from router.cluster.pool_share import PoolShare
from router.cluster.sharing import Sharing

__all__ = ["Feed", "Link", "PoolShare", "Role", "Sharing"]
