"""Stand in for `vllm serve`: the emulator, with what the compose files say in vLLM's own flags."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("model")
parser.add_argument("--served-model-name", required=True)
parser.add_argument("--max-model-len", required=True)
parser.add_argument("--gpu-memory-utilization", type=float)
parser.add_argument("--host", required=True)
parser.add_argument("--port", required=True)
parser.add_argument("--enable-auto-tool-choice", action="store_true")
parser.add_argument("--tool-call-parser")
parser.add_argument("--reasoning-parser")
parser.add_argument("--enable-prompt-tokens-details", action="store_true", required=True)
parser.add_argument("--kv-events-config", type=json.loads, required=True)
parser.add_argument("--kv-transfer-config", type=json.loads)
given = parser.parse_args()

assert os.environ["NVIDIA_VISIBLE_DEVICES"] in ("0", "1"), "one GPU for each engine"
events = given.kv_events_config
assert events["enable_kv_cache_events"] is True
words = [
    "warmroute",
    "emulate",
    f"--host={given.host}",
    f"--port={given.port}",
    f"--served-model-name={given.served_model_name}",
    f"--events-port={events['endpoint'].rpartition(':')[2]}",
    f"--replay-port={events['replay_endpoint'].rpartition(':')[2]}",
]
if given.kv_transfer_config is not None:
    assert given.kv_transfer_config["kv_connector"] == "MooncakeStoreConnector"
    settings = json.loads(Path(os.environ["MOONCAKE_CONFIG_PATH"]).read_text())
    words.append(f"--pool=http://{settings['master_server_address'].rpartition(':')[0]}:9003")
print(*words, file=sys.stderr, flush=True)
os.execvp(words[0], words)
