"""The names of attributes and events, in one place: the conventions still change.

Source: open-telemetry/semantic-conventions-genai at 024a4f9, docs/gen-ai/client-inference.md
(status: Development), and semantic-conventions 1.44.0, docs/http/http-spans.md (stable). What these
have no name for begins with `warmroute.`; times there are in seconds.

Usage stands at the CLIENT span alone. Otherwise backends that add up usage would count it twice.
"""

from __future__ import annotations

from typing import Final

ERROR_TYPE: Final = "error.type"
HTTP_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_STATUS: Final = "http.response.status_code"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"

OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
MODEL: Final = "gen_ai.request.model"
STREAM: Final = "gen_ai.request.stream"
COMPACTED: Final = "gen_ai.conversation.compacted"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
CACHE_READ_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
FIRST_CHUNK_S: Final = "gen_ai.response.time_to_first_chunk"

VLLM: Final = "vllm"
OPERATIONS: Final = {
    "chat": "chat",
    "messages": "chat",
    "responses": "chat",
    "completions": "text_completion",
}
"""The operation of each API (`Api.name`); others have no name."""

REQUEST_ID: Final = "warmroute.request_id"
TENANT: Final = "warmroute.tenant"
SESSION: Final = "warmroute.session"
"""A digest. `gen_ai.conversation.id` must be the client's own id, which is written nowhere."""

OUTCOME: Final = "warmroute.outcome"
REPLICA: Final = "warmroute.replica"
ROLE: Final = "warmroute.role"
TRY: Final = "warmroute.try"
POLICY: Final = "warmroute.policy"
REASON: Final = "warmroute.reason"
CACHE_STATE: Final = "warmroute.cache_state"
VARIANT: Final = "warmroute.arm"
ROUTER_S: Final = "warmroute.router_s"
WAITED_S: Final = "warmroute.waited_s"
WAITED_FOR: Final = "warmroute.waited_for"
PREDICTED_TTFT_S: Final = "warmroute.predicted_ttft_s"
TTFT_S: Final = "warmroute.ttft_s"
PROMPT_TOKENS: Final = "warmroute.prompt_tokens"
PREDICTED_TOKENS: Final = "warmroute.predicted_cached_tokens"
CACHED_TOKENS: Final = "warmroute.cached_tokens"
COMPUTED: Final = "warmroute.computed."
"""Tokens that were computed; a cause of `router.records.computed` follows."""

CHANGED_PART: Final = "warmroute.changed.part"
CHANGED_OFFSET: Final = "warmroute.changed.offset"
MOVED_FROM: Final = "warmroute.moved_from"
LOST_AT: Final = "warmroute.lost_at"

QUEUED: Final = "warmroute.queued"
DECIDED: Final = "warmroute.decided"
FIRST_TOKEN: Final = "warmroute.first_token"
