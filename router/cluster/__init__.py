"""What routers share through Redis.

    link             whether Redis is there: connect, try again, log it
    following        each candidate's engine, from the blocks that Redis has
    index_writer     what this router writes to Redis, of the streams whose lease it holds
    outbox           our requests, as notes for the others
    peers            the others' notes: their kinds, and what they change here
    shares           orders, pauses, sessions and responses, queues, the shared pool

`Sharing` puts them together, in one loop each. The replicas' watches follow candidates by its
`following`. No request waits for any of it, and none fails because of it. Errors of Redis are
counted and logged once, and every router goes on with its own view.
"""

from router.cluster.link import Link
from router.cluster.shares import OrderShare, PoolShare, RecordShare
from router.cluster.sharing import SharedState, Sharing

__all__ = ["Link", "OrderShare", "PoolShare", "RecordShare", "SharedState", "Sharing"]
