"""Which model a request names, on routes whose prompt is not read.

    JSON        `model`, on any route
    a form      its `model` part (router.api.forms)
    a header    SageMaker's, on /invocations: it goes before the body there
    a query     `?model=`, on routes that an operator added: OpenAI's realtime calls

Source: vLLM 0.32 entrypoints, where every inference route takes `model` in its body;
model_hosting_container_standards/sagemaker/lora for the header.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import parse_qsl

_ADAPTER: Final = "X-Amzn-SageMaker-Adapter-Identifier"
_MAX_QUERY_CHARS: Final = 4_096


def named_model(
    path: str,
    query: str,
    headers: Mapping[str, str],
    *,
    form_model: str | None,
    view: Mapping[str, Any] | None,
    reads_query: bool,
) -> str | None:
    """Find the model that a request names; None: it names none, or not clearly.

    Args:
        path, query: Its target.
        headers: By any spelling.
        form_model: Named by the body, which is a form.
        view: The body decoded; None: it is no JSON object.
        reads_query: Whether the route may take it from there.
    """
    if path == "/invocations" and (adapter := headers.get(_ADAPTER)):
        return adapter
    model = view.get("model") if view is not None else form_model
    if model is None and reads_query and "model=" in query and len(query) <= _MAX_QUERY_CHARS:
        model = dict(parse_qsl(query)).get("model")
    return model if isinstance(model, str) and model else None
