"""Answers of an engine about itself."""

from __future__ import annotations

METRICS = """# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
process_start_time_seconds 1.79516382478e+09
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
vllm:num_requests_running{engine="1",model_name="tiny"} 4.0
vllm:num_requests_waiting{engine="0",model_name="tiny"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 9.0
vllm:cache_config_info{block_size="32",cache_dtype="fp8",enable_prefix_caching="True",engine="0",num_gpu_blocks="1200",prefix_caching_hash_algo="sha256"} 1.0
"""  # noqa: E501


SOURCES = {
    "0": {"enable_kv_cache_events": True, "endpoint": "tcp://*:5557", "replay_endpoint": None},
    "1": {"enable_kv_cache_events": True, "endpoint": "tcp://*:5558", "topic": "kv"},
}


MODELS = {"data": [{"id": "tiny", "root": "/models/tiny", "parent": None, "max_model_len": 4096}]}
