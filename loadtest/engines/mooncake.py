"""A real Mooncake pool over TCP: its master, memory for it, and the replicas that use it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import httpx

from loadtest.engines.ports import free_port
from loadtest.engines.process import Process, read_metric
from loadtest.engines.vllm import (
    BLOCK_BYTES,
    MAX_MODEL_LEN,
    NUM_BLOCKS,
    PRELOAD,
    TOOL_OPTIONS,
    Engine,
    engine_python,
)

MASTER_READY_S: Final = 30.0
SEGMENT_BYTES: Final = 1_024 * BLOCK_BYTES
_CLUSTER: Final = "warmroute"  # in etcd, of masters and their clients


class Master(Process):
    """A real `mooncake_master`; `url` is its metrics port. It can be killed and started again.

    Args:
        lease_ms: How long an object that an engine looked up is safe from eviction.
        watermark: Share of the segments' memory from which on it evicts. (A segment has 16 MiB
            at least, 1,024 blocks of the tiny model, or 512 in float32.)
        etcd: `HOST:PORT` of the etcd by which masters of one pool choose the one that serves;
            None: it is the only one.
        has_disk: What it would evict goes to the disk of the owner of the memory (see `memory`).
    """

    __slots__ = ("_etcd", "_has_disk", "_metadata_port", "_rpc_port")

    def __init__(
        self,
        log_dir: Path,
        *,
        lease_ms: int = 2_000,
        watermark: float = 0.95,
        etcd: str | None = None,
        has_disk: bool = False,
    ) -> None:
        self._etcd = etcd
        self._has_disk = has_disk
        self._rpc_port, self._metadata_port, port = free_port(), free_port(), free_port()
        command: list[str | Path] = [
            engine_python().parent / "mooncake_master",
            "--rpc_address", "127.0.0.1", "--rpc_port", str(self._rpc_port),
            "--enable_http_metadata_server=true", "--http_metadata_server_host", "127.0.0.1",
            "--http_metadata_server_port", str(self._metadata_port),
            "--metrics_port", str(port), "--default_kv_lease_ttl", str(lease_ms),
            "--eviction_high_watermark_ratio", str(watermark), "--eviction_ratio", "0.05",
        ]  # fmt: skip
        if etcd is not None:
            command += [
                "--enable_ha=true", "--ha_backend_type", "etcd",
                "--etcd_endpoints", f"http://{etcd}", "--cluster_id", _CLUSTER,
            ]  # fmt: skip
        if has_disk:
            command += ["--enable_offload=true", "--offload_on_evict=true"]
        super().__init__(
            f"master-{port}",
            f"http://127.0.0.1:{port}",
            command,
            log_dir / f"master-{port}.log",
            PRELOAD,
        )

    def metric(self, name: str) -> float:
        """Read one of its metrics."""
        return read_metric(httpx.get(f"{self.url}/metrics", timeout=30, trust_env=False).text, name)

    @property
    def options(self) -> tuple[str, ...]:
        """The router's options for it: two cores for two engines and it make its answers late."""
        return "--mooncake", self.url, "--set", "mooncake.verify_timeout_s=0.1"

    def keys(self) -> list[str]:
        """List the objects in the pool."""
        return httpx.get(f"{self.url}/get_all_keys", timeout=30, trust_env=False).text.split()

    def memory(self, log_dir: Path, *, segment_bytes: int = SEGMENT_BYTES) -> Process:
        """Make a process that gives memory to the pool: what is there outlives every replica."""
        port, http_port = free_port(), free_port()
        command: list[str | Path] = [
            engine_python().parent / "mooncake_client",
            "--host", f"127.0.0.1:{port}", "--port", str(port), "--protocol", "tcp",
            "--master_server_address", f"127.0.0.1:{self._rpc_port}",
            "--metadata_server", f"http://127.0.0.1:{self._metadata_port}/metadata",
            "--global_segment_size", str(segment_bytes),
            "--enable_http_server", "--http_port", str(http_port),
        ]  # fmt: skip
        environ: dict[str, str] = {}
        if self._has_disk:
            disk = log_dir / f"disk-{port}"
            disk.mkdir()
            command.append("--enable_offload=true")
            environ = {
                "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(disk),
                "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
                "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(128 << 20),
                "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "16",
            }
        return Process(
            f"memory-{port}",
            f"http://127.0.0.1:{http_port}",
            command,
            log_dir / f"memory-{port}.log",
            {**PRELOAD, "MC_TCP_BIND_ADDRESS": "127.0.0.1", **environ},
        )

    def engine(
        self,
        name: str,
        log_dir: Path,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        buffer_steps: int | None = None,
        num_blocks: int = NUM_BLOCKS,
        max_model_len: int = MAX_MODEL_LEN,
        load_failure_policy: str = "recompute",
        kv_role: str = "kv_both",
        extra_config: Mapping[str, object] | None = None,
        options: Sequence[str] = (),
    ) -> Engine:
        """Make a replica that reads and writes this master's pool, over TCP.

        Args:
            segment_bytes: What it gives to the pool; 0: nothing, see `memory`.
            buffer_steps: Event batches that it can replay; None: vLLM's default, 10,000.
            load_failure_policy: What it does where a pool object is gone; `fail`, vLLM's own
                default, ends the request with an error.
            kv_role: kv_producer writes, kv_consumer reads.
            extra_config: More of the connector's own configuration.
            options: More of its command line.
        """
        config_path = log_dir / f"{name}-mooncake.json"
        metadata = f"http://127.0.0.1:{self._metadata_port}/metadata"
        address = f"127.0.0.1:{self._rpc_port}"
        if self._etcd is not None:  # whichever master serves; no metadata may go with one
            metadata, address = "P2PHANDSHAKE", f"etcd://{self._etcd}"
        config_path.write_text(
            json.dumps(
                {
                    "metadata_server": metadata,
                    "master_server_address": address,
                    "global_segment_size": str(segment_bytes),
                    "local_buffer_size": str(64 << 20),
                    "protocol": "tcp",
                    "device_name": "",
                    "mode": "embedded" if segment_bytes else "standalone-store",
                    "enable_offload": self._has_disk,
                }
            )
        )
        connector = {
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": kv_role,
            "kv_load_failure_policy": load_failure_policy,
            # Names a socket in /tmp: two engines on one host must not share it.
            "kv_connector_extra_config": {"lookup_rpc_port": free_port(), **(extra_config or {})},
        }
        return Engine(
            name,
            log_dir,
            buffer_steps=buffer_steps,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            options=(*TOOL_OPTIONS, "--kv-transfer-config", json.dumps(connector), *options),
            environ={
                "MC_TCP_BIND_ADDRESS": "127.0.0.1",
                "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": "127.0.0.1",
                "MOONCAKE_CONFIG_PATH": str(config_path),
                "MC_STORE_CLUSTER_ID": _CLUSTER,
            },
        )  # fmt: skip
