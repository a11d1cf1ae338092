"""Start vLLM's CPU build as its image would: the words of the compose file, and small caches."""

from __future__ import annotations

import os
import sys

# The CPU attention wants blocks of 32 tokens; the weights are dummies of the tiny model.
ADDED = [
    "--load-format=dummy", "--block-size=32", "--num-gpu-blocks-override=768", "--enforce-eager",
]  # fmt: skip
words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", *sys.argv[1:]]
os.execv(words[0], [*words, *ADDED])
