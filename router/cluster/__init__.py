"""What routers share through Redis.

    link             whether Redis is there: connect, try again, log it
    following        each candidate's engine, from the blocks that Redis has
    snapshot_loader  those blocks, in the background
    index_writer     what this router writes to Redis, of the streams whose lease it holds
    loops            read and publish notes, hold leases: one loop each
    notes            the kinds of notes, and who receives each
    outbox           our requests, as notes for the others
    peers            what the others' notes change here
    pool_share       who lists the shared pool, and what was learned of it
    order_share      what operators ordered about replicas
    pause_share      that an engine was paused or resumed
    record_share     which replica had a session's last turn, and which one issued a response

`Sharing` puts them together; the replicas' watches follow candidates by its `following`.
No request waits for any of it, and none fails because of it. Errors of Redis are counted and logged
once, and every router goes on with its own view.
"""

from router.cluster.link import Link
from router.cluster.order_share import OrderShare
from router.cluster.pool_share import PoolShare
from router.cluster.record_share import RecordShare
from router.cluster.sharing import SharedState, Sharing

__all__ = ["Link", "OrderShare", "PoolShare", "RecordShare", "SharedState", "Sharing"]
