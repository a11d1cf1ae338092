"""Stand in for Mooncake's master: the pool of an emulated engine that gets no requests."""

from __future__ import annotations

import os
import sys

flags = dict(word.removeprefix("--").split("=", 1) for word in sys.argv[1:])
address, port = flags["rpc_address"], flags["rpc_port"]
pool = f"--serve-pool={flags['metrics_port']}"
words = ["warmroute", "emulate", "--host=0.0.0.0", f"--port={port}", pool, "--no-events"]
os.execvp(words[0], words)
