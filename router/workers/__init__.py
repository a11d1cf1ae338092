"""`warmroute serve --workers N`: several processes behind one port, and their parent.

    supervise      the parent: reserves ports, starts workers, passes signals on   `supervise`
    child          one process that is started again when it ends                  `Child`
    private_redis  the Redis that workers share if none is configured              `PrivateRedis`

The parent answers no request. A worker is a router in a process of its own, as its parent says
(router.config.worker). Workers share state as routers of one Redis do (router.cluster), and answer
the admin port for one another (router.http.siblings).

    SIGTERM, SIGINT   to the parent: passed on; it ends when all workers have drained
    SIGHUP            passed on: each worker reads its files again
    a worker ends     it is started again: at once, then after pauses that grow to 5 s
    Redis ends        the same, if it is the parent's; meanwhile each worker routes by itself
    the parent ends   workers drain, and its Redis ends
"""

from router.workers.supervise import supervise

__all__ = ["supervise"]
