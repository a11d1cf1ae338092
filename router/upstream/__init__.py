"""HTTP to the replicas: one request, a deadline per phase, failures as our own errors.

    client     one request, up to the first bytes of its answer     `Upstream`
    session    a request on a kept connection, the response's head  `HttpSession`
    answer     the answer, read to its end, and its bytes as they come  `Answer`

An answer is returned with its first body bytes already read: up to there a failure costs the
client nothing and the data path moves on.
"""

from router.upstream.answer import Answer
from router.upstream.client import Upstream
from router.upstream.session import HOP_BY_HOP, end_to_end

__all__ = ["HOP_BY_HOP", "Answer", "Upstream", "end_to_end"]
