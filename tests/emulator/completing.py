"""Completions of an emulated replica."""

from __future__ import annotations

from typing import Any

import aiohttp

from loadtest.emulator.emulator import Emulator


async def complete(replica: Emulator, prompt: list[int], **fields: Any) -> int:
    """Complete a prompt; return the cached tokens that the replica reports."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 3} | fields
    async with aiohttp.ClientSession() as client:
        async with client.post(f"{replica.url}/v1/completions", json=body) as response:
            answer = await response.json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
