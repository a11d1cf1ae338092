"""What routers share through Redis, beside the requests.

    link          whether Redis is there: connect, try again, log it
    membership    who leads each candidate's stream: this router, another one, or none
    publication   what a leader publishes of it
    catch_up      what a follower loads before it can follow
    loops         read, write, publish what is in flight, hold leases: one loop each
    loader        snapshots, in the background
    outbox        our requests, as notes for the others
    peers         what the others' notes change here
    pool_share    who lists the shared pool, and what was learned of it
    order_share   what operators ordered: replicas, experiments
    record_share  which replica had a session's last turn, and which one issued a response
    following     a candidate's blocks, from its engine or from its leader

`Sharing` puts them together; the replicas' watches follow candidates by its `following`.
No request waits for any of it, and none fails because of it: what goes wrong with Redis is counted,
logged once, and every router goes on with its own view.
"""

from router.cluster.link import Link
from router.cluster.membership import Membership, Role
from router.cluster.order_share import OrderShare
from router.cluster.pool_share import PoolShare
from router.cluster.record_share import RecordShare
from router.cluster.sharing import Sharing

__all__ = ["Link", "Membership", "OrderShare", "PoolShare", "RecordShare", "Role", "Sharing"]
