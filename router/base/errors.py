"""Every error a client or an operator can meet, whose fault it is, and how it is answered.

RouterError                    status  code
├── ClientError                        the request is wrong; never counts against a replica
│   ├── BadRequest              400    invalid_request_error
│   ├── Unauthorized            401    invalid_api_key          (tenants)
│   ├── UnknownModel            404    model_not_found
│   ├── RateLimited             429    rate_limit_exceeded      (Retry-After)
│   ├── QueueFull               429    queue_full               (Retry-After)
│   ├── DeadlineUnmet           429    deadline_unmet           (Retry-After)
│   ├── TbtUnmet                429    tbt_unmet                (Retry-After)
│   ├── UnsupportedBody         415    unsupported_media_type   (tenants)
│   ├── PayloadTooLarge         413    payload_too_large
│   ├── HeadersTooLarge         431    headers_too_large
│   ├── TemplateFailed          400    chat_template_error
│   ├── UnsupportedEncoding     415    unsupported_encoding
│   ├── RequestKills            422    request_kills_replicas  (x-should-retry: false)
│   ├── UnknownRoute            404    unknown_route
│   ├── RouteNotServed          404    route_not_served         (no replica has it)
│   ├── ResponseNotFound        404    response_not_found       (its replica is gone)
│   ├── MethodNotAllowed        405    method_not_allowed       (Allow)
│   ├── AdminRefused            401, 403, 415  admin_refused      (admin API)
│   ├── UnknownReplica          404    unknown_replica          (admin API)
│   ├── ReplicaConflict         409    replica_conflict         (admin API)
│   ├── UnknownSession          404    unknown_session          (admin API)
├── NoReplicaAvailable          503    no_replica_available      (Retry-After)
│   └── OutOfConnections        503    out_of_connections        ours: descriptors, memory
├── Overloaded                  503    overloaded               this router's limits are reached
├── ShuttingDown                503    shutting_down            the router ends
├── UpstreamError                      the replica is wrong; counts against it
│   ├── NotAsked                502    not_asked                (ours; a probe that was none)
│   ├── UpstreamUnreachable     502    upstream_unreachable
│   │   ├── HostUnknown         502    upstream_unreachable     (its name does not resolve)
│   │   └── TlsRefused          502    upstream_unreachable     (no certificate that is accepted)
│   ├── SetAside                503    set_aside                (it sleeps or is paused)
│   ├── UpstreamTimeout         504    upstream_timeout
│   │   ├── ConnectTimeout      504    connect_timeout          (nothing was sent)
│   │   ├── Overdue             504    overdue                  (left for a sooner one)
│   │   └── Stalled             504    stalled                  (it computes nothing)
│   └── UpstreamBroken          502    upstream_broken
│       ├── AnswerUnreadable    502    answer_unreadable        (it was generated: not again)
│       └── KeyRefused          502    upstream_broken          (the engine has an --api-key)
├── StoreError                         Redis is wrong: counted, survived, never a client's answer
│   ├── StoreUnavailable        -      gone, slow, or failing over: tried again
│   └── StoreRefused            -      it will not do as it is: password, schema, read-only
│       └── StoreFull           -      it has no room for this
├── PoolError                   -      the Mooncake master is slow or not understood
│   ├── PoolGone                -      nothing listens where it should be
│   └── PoolLate                -      a deadline of ours passed; it may be well
├── DiscoveryError              -      a source of replicas fails: those it named last stay
└── ConfigError                 -      the operator's; printed, exit status 2
    └── ConfigErrors            -      several at once, a line each

Raised anywhere, turned into an API's own JSON in router.http alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final


class RouterError(Exception):
    """An error with an answer. `param` names the offending field, None where there is none."""

    status: ClassVar[int] = 500
    code: ClassVar[str] = "internal_error"
    type: ClassVar[str] = "InternalServerError"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ClientError(RouterError):
    status = 400
    type = "BadRequestError"


class BadRequest(ClientError):
    code = "invalid_request_error"


class Unauthorized(ClientError):
    """The client's key is missing or unknown."""

    status = 401
    code = "invalid_api_key"
    type = "AuthenticationError"


class RetryLater(ClientError):
    """The request is fine, but not now: the answer has Retry-After."""

    status = 429
    type = "RateLimitError"
    text: ClassVar[str] = ""  # never a prediction: that would say what is cached

    def __init__(self, message: str = "", *, retry_after_s: float) -> None:
        super().__init__(message or self.text)
        self.retry_after_s = retry_after_s


class RateLimited(RetryLater):
    """A caller has as many requests in flight as it may."""

    code = "rate_limit_exceeded"


class QueueFull(RetryLater):
    """The queue is at its limit; see router.request.queue."""

    code = "queue_full"
    text = "Too many requests are waiting; try again later."


class DeadlineUnmet(RetryLater):
    """A first token is predicted to come too late; see router.scheduling.queue."""

    code = "deadline_unmet"
    text = "The first token would come after the deadline; try again later."


class TbtUnmet(RetryLater):
    """Answers are slower than they may be, and stay so; see router.scheduling.queue."""

    code = "tbt_unmet"
    text = "The answer would be too slow; try again later."


class UnsupportedBody(ClientError):
    """A body that cannot be given its caller's cache salt."""

    status = 415
    code = "unsupported_media_type"
    type = "UnsupportedMediaTypeError"


class NotFound(ClientError):
    status = 404
    type = "NotFoundError"


class UnknownModel(NotFound):
    code = "model_not_found"


class PayloadTooLarge(ClientError):
    status = 413
    code = "payload_too_large"


class HeadersTooLarge(ClientError):
    status = 431
    code = "headers_too_large"


class TemplateFailed(ClientError):
    """The model's chat template refused the messages."""

    code = "chat_template_error"


class UnsupportedEncoding(ClientError):
    """A body is compressed in a way that is not read here."""

    status = 415
    code = "unsupported_encoding"
    type = "UnsupportedMediaTypeError"


class RequestKills(ClientError):
    """Replicas went down while they processed this request; see router.replicas.deaths."""

    status = 422
    code = "request_kills_replicas"
    type = "request_kills_replicas"


class UnknownRoute(NotFound):
    """The public port does not serve it."""

    code = "unknown_route"


class RouteNotServed(NotFound):
    """Every replica that could answer lacks the route: its release, or its model, has none."""

    code = "route_not_served"


class ResponseNotFound(ClientError):
    """No replica has a response; worded as vLLM 0.32 does (openai/responses/serving.py)."""

    status = 404
    code = "response_not_found"
    type = "invalid_request_error"

    def __init__(self, response_id: str) -> None:
        super().__init__(f"Response with id '{response_id}' not found.", param="response_id")


class MethodNotAllowed(ClientError):
    """The route takes other methods: `allowed`."""

    status = 405
    code = "method_not_allowed"
    type = "MethodNotAllowedError"

    def __init__(self, message: str, *, allowed: str) -> None:
        super().__init__(message)
        self.allowed = allowed


class AdminRefused(ClientError):
    """A request to the admin port that is not an operator's; see router.http.admin."""

    code = "admin_refused"

    def __init__(self, status: int, message: str, param: str) -> None:
        super().__init__(message, param=param)
        self.status = status  # type: ignore[misc]  # one class: no caller needs to know which


class UnknownReplica(NotFound):
    """An order names a replica that does not exist."""

    code = "unknown_replica"


class ReplicaConflict(ClientError):
    """A replica cannot be added: its name or its address is another's."""

    status = 409
    code = "replica_conflict"
    type = "ConflictError"


class UnknownSession(NotFound):
    """A session, or a request, that the ledger does not have, or not any more."""

    code = "unknown_session"


class NoReplicaAvailable(RouterError):
    status = 503
    code = "no_replica_available"
    type = "ServiceUnavailableError"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Overloaded(RouterError):
    """This router has no room: connections, descriptors. No replica is to blame."""

    status = 503
    code = "overloaded"
    type = "ServiceUnavailableError"


class ShuttingDown(RouterError):
    """The router ends before the answer could."""

    status = 503
    code = "shutting_down"
    type = "ServiceUnavailableError"


class OutOfConnections(NoReplicaAvailable):
    """This router cannot open another connection; no replica is to blame."""

    code = "out_of_connections"


class UpstreamError(RouterError):
    """A replica failed; `replica` names it."""

    status = 502
    type = "BadGatewayError"

    def __init__(self, replica: str, message: str) -> None:
        super().__init__(message)
        self.replica = replica


class NotAsked(UpstreamError):
    """This router could not ask: it is short of descriptors or memory."""

    code = "not_asked"


class UpstreamUnreachable(UpstreamError):
    code = "upstream_unreachable"


class HostUnknown(UpstreamUnreachable):
    """The name of a replica's host does not resolve."""


class TlsRefused(UpstreamUnreachable):
    """Something listens, and no TLS connection comes about."""


class SetAside(UpstreamError):
    """A replica sleeps or is paused: it is well, and computes nothing for now."""

    status = 503
    code = "set_aside"


class UpstreamTimeout(UpstreamError):
    status = 504
    code = "upstream_timeout"


class ConnectTimeout(UpstreamTimeout):
    code = "connect_timeout"


class Overdue(UpstreamTimeout):
    """A first token did not come in the time that was predicted."""

    code = "overdue"


class Stalled(UpstreamTimeout):
    """A replica takes requests and computes nothing."""

    code = "stalled"


class UpstreamBroken(UpstreamError):
    """The connection or the answer broke off, or was not HTTP."""

    code = "upstream_broken"


class AnswerUnreadable(UpstreamBroken):
    """An answer came whose head cannot be read, or exceeds the router's limits."""

    code = "answer_unreadable"


class KeyRefused(UpstreamBroken):
    """The engine wants an API key, or another one."""


class StoreError(RouterError):
    """Redis failed. The side path's: no request is ever answered with it."""

    code = "store_error"


class StoreUnavailable(StoreError):
    code = "store_unavailable"


EMPTIED: Final = "Redis was emptied or replaced"
"""The message of StoreUnavailable where the index that this router knew is gone from it."""


class StoreRefused(StoreError):
    """Redis answers, but not as needed; the message says what to do about it."""

    code = "store_refused"


class StoreFull(StoreRefused):
    """Redis has no room for this; what needs none goes through."""


class PoolError(RouterError):
    """The Mooncake master failed. The side path's, too."""

    code = "pool_error"


class PoolGone(PoolError):
    """Nothing listens at the master's address: engines find nothing there either."""

    code = "pool_gone"


class PoolLate(PoolError):
    """No answer within a deadline of ours; the master may be well."""

    code = "pool_late"


class DiscoveryError(RouterError):
    """A source of replicas cannot be asked, or gives an answer that cannot be used."""


class ConfigError(RouterError):
    """The configuration names something that does not exist or makes no sense."""


class ConfigErrors(ConfigError):
    """Several errors of one configuration."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        super().__init__("; ".join(each.message for each in errors), param=errors[0].param)
        self.errors = tuple(errors)
