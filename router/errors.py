"""Every error a client or an operator can meet, whose fault it is, and how it is answered.

RouterError                    status  code
├── ClientError                        the request is wrong; never counts against a replica
│   ├── BadRequest              400    invalid_request_error
│   ├── UnknownModel            404    model_not_found
│   ├── PayloadTooLarge         413    payload_too_large
│   └── TemplateFailed          400    chat_template_error
├── NoReplicaAvailable          503    no_replica_available      (Retry-After)
├── UpstreamError                      the replica is wrong; counts against it
│   ├── UpstreamUnreachable     502    upstream_unreachable
│   ├── UpstreamTimeout         504    upstream_timeout
│   └── UpstreamBroken          502    upstream_broken
└── ConfigError                 -      the operator's; printed, exit status 2

Raised on any floor, turned into an API's own JSON in router.http alone.
"""

from __future__ import annotations

from typing import ClassVar


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


class UnknownModel(ClientError):
    status = 404
    code = "model_not_found"
    type = "NotFoundError"


class PayloadTooLarge(ClientError):
    status = 413
    code = "payload_too_large"


class TemplateFailed(ClientError):
    """The model's chat template refused the messages."""

    code = "chat_template_error"


class NoReplicaAvailable(RouterError):
    status = 503
    code = "no_replica_available"
    type = "ServiceUnavailableError"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UpstreamError(RouterError):
    """A replica failed; `replica` names it."""

    status = 502
    type = "BadGatewayError"

    def __init__(self, replica: str, message: str) -> None:
        super().__init__(message)
        self.replica = replica


class UpstreamUnreachable(UpstreamError):
    code = "upstream_unreachable"


class UpstreamTimeout(UpstreamError):
    status = 504
    code = "upstream_timeout"


class UpstreamBroken(UpstreamError):
    """The connection or the answer broke off, or was not HTTP."""

    code = "upstream_broken"


class ConfigError(RouterError):
    """The configuration names something that does not exist or makes no sense."""

    code = "config_error"
