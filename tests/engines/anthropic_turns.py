"""What an application does with Anthropic's package, at the base URL it is given; prints JSON.

Run by the interpreter that has the package: the engines' (see test_5_sdks.py).
"""

from __future__ import annotations

import json
import sys
from typing import Any

from anthropic import Anthropic, BadRequestError, NotFoundError

TOOL: dict[str, Any] = {
    "name": "read_file",
    "description": "Read a file.",
    "input_schema": {"type": "object", "properties": {"path": {"type": "string"}}},
}
ASKED: list[Any] = [{"role": "user", "content": "Read the file. " * 40}]
CALLED: list[Any] = [
    *ASKED,
    {
        "role": "assistant",
        "content": [{"type": "tool_use", "id": "t1", "name": "read_file", "input": {"path": "a"}}],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "import os\n" * 40}],
    },
]


def refusal(client: Anthropic, kind: type[Exception], **fields: Any) -> str:
    try:
        client.messages.create(**{"model": "tiny", "max_tokens": 1, "messages": ASKED, **fields})
    except kind as exc:
        return str(exc)
    return "not refused"


def main() -> None:
    client = Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "tools": [TOOL]}
    whole = client.messages.with_raw_response.create(**asked, messages=ASKED)
    with client.messages.stream(**asked, messages=CALLED) as stream:
        text = "".join(stream.text_stream)
        streamed = stream.get_final_message()
    counted = client.messages.count_tokens(model="tiny", messages=CALLED, tools=[TOOL])
    found = {
        "replica": whole.headers["x-warmroute-replica"],
        "first": whole.parse().usage.model_dump(),
        "second": streamed.usage.model_dump(),
        "is_text_whole": text == "".join(block.text for block in streamed.content),
        "counted": counted.input_tokens,
        "unknown_model": refusal(client, NotFoundError, model="no-such-model"),
        "server_tool": refusal(
            client,
            BadRequestError,
            tools=[{"type": "web_search_20250305", "name": "web_search"}],
        ),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
