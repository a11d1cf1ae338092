"""Settings of replicas: which there are, what they run, how requests get there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import force_setattr

from router.api.body import FIELDS
from router.base.addresses import base_url, endpoint_place, place_of
from router.base.engines import Role, Transfer
from router.config.ranges import Seconds

CostPerHour = Annotated[float, Meta(gt=0, le=1e9)]
ClientField = Literal["kv_transfer_params", "ec_transfer_params", "vllm_xargs", "priority"]


class ReplicaConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One vLLM server. Everything but `url` is discovered; set it to overrule."""

    url: Annotated[
        str, Meta(description="base URL, e.g. http://10.0.0.5:8000; /v1 at its end is left out")
    ]
    name: Annotated[
        str | None, Meta(description="name in metrics and headers; default r1, r2, …")
    ] = None
    events: Annotated[
        tuple[str, ...],
        Meta(description="KV event PUB endpoints, one per rank, e.g. tcp://10.0.0.5:5557"),
    ] = ()
    replay: Annotated[
        tuple[str, ...], Meta(description="KV event replay endpoints, one per rank")
    ] = ()
    pool: Annotated[
        bool | str | None,
        Meta(
            description="whether it takes part in the Mooncake pool; default: detected. With "
            "several pools: the name of its pool, or false"
        ),
    ] = None
    eagle: Annotated[
        bool | None,
        Meta(
            description="whether it drops the last block of each hit. It does with "
            "--speculative-config and method eagle, eagle3 or mtp (until vLLM 0.32 also dflash and "
            "dspark), unless disable_eagle_block_drop is set. From vLLM 0.33 it does so only with "
            "a KV connector or disable_lookahead_block_hashes. Events that show such hashes take "
            "precedence. Default: it does not (docs/concepts/hashes.md)"
        ),
    ] = None
    hardware: Annotated[
        Annotated[str, Meta(pattern="^[A-Za-z0-9._-]{1,64}$")] | None,
        Meta(
            description="name of its hardware, e.g. h100-tp2. Replicas with the same model and "
            "hardware share what is learned of their speed. Default: all replicas of a model",
        ),
    ] = None
    weight: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="highest share of the requests in flight, as a factor of an equal share; "
            "below 1 for capacity that may be taken away",
        ),
    ] = 1.0
    role: Annotated[
        Role,
        Meta(
            description="both; or prefill or decode, if prompts and answers are computed apart "
            "(docs/guides/prefill-decode.md)"
        ),
    ] = "both"
    transfer: Annotated[
        Transfer | None,
        Meta(description="store, mooncake or nixl; default: prefill.transfer"),
    ] = None
    bootstrap: Annotated[
        str | None,
        Meta(
            description="base URL of its bootstrap server, for role prefill and transfer mooncake; "
            "default: port 8998 of the host in `url`",
        ),
    ] = None
    cost_per_hour: Annotated[
        CostPerHour | None,
        Meta(
            description="what an hour of it costs, with all its GPUs, in any currency; default: "
            "engine.cost_per_hour"
        ),
    ] = None
    pool_layout: Annotated[
        str | None,
        Meta(
            description="its layout in the pool, if replicas differ: `@`-separated fields of "
            "key_pattern in /admin/pool, e.g. tp_rank:0-3 or the cache_prefix",
        ),
    ] = None

    def __post_init__(self) -> None:
        force_setattr(self, "url", base_url(self.url))

    @property
    def identity(self) -> str:
        """What routers call this replica among themselves: each may number its own differently."""
        return self.name or self.url

    @property
    def places(self) -> dict[str, str]:
        """What no other replica may have: each field of its URL and endpoints, with its place."""
        places = {"url": place_of(self.url)}
        for field, endpoints in (("events", self.events), ("replay", self.replay)):
            for i, endpoint in enumerate(endpoints):
                places[f"{field}[{i}]"] = endpoint_place(endpoint, self.url)
        return places

    @property
    def addresses(self) -> dict[str, tuple[str, ...]]:
        """Every address that a router connects to for it, by field."""
        return {
            "url": (self.url,),
            "events": self.events,
            "replay": self.replay,
            "bootstrap": (self.bootstrap,) if self.bootstrap is not None else (),
        }


class EngineConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    api_key_file: Annotated[
        Path | None,
        Meta(description="file with the engines' --api-key, for discovery; clients send their own"),
    ] = None
    key_hosts: Annotated[
        tuple[str, ...],
        Meta(
            description="hosts of added replicas that may be sent that key, too, as in "
            "admin.replica_hosts; configured replicas always are"
        ),
    ] = ()
    cost_per_hour: Annotated[
        CostPerHour | None,
        Meta(
            description="what an hour of a replica costs that has no cost_per_hour of its own",
            extra={"flag": "cost-per-hour", "metavar": "NUMBER"},
        ),
    ] = None


class HashConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    seeds: Annotated[
        tuple[str, ...],
        Meta(description="PYTHONHASHSEED of the engines, if set; tried first"),
    ] = ()


class EventsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    enabled: Annotated[bool, Meta(description="follow the engines' KV events")] = True


class PoolConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of several pools; the only one, that of `MooncakeConfig.master`, has the name ""."""

    name: Annotated[str, Meta(pattern="^[A-Za-z0-9._-]{1,64}$")]
    master: str


class MooncakeConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The pool that replicas share (vLLM's MooncakeStoreConnector), or several."""

    master: Annotated[
        str | None,
        Meta(
            description="base URL of the Mooncake master's --metrics_port, e.g. "
            "http://10.0.0.5:9003; of one pool's several masters, with commas or repeated",
            extra={"flag": "mooncake", "metavar": "URL", "joined": True},
        ),
    ] = None
    pools: Annotated[
        tuple[PoolConfig, ...],
        Meta(
            description="several pools, instead of master: each with name and master "
            "(docs/guides/mooncake.md)",
            extra={"only_in_file": True},
        ),
    ] = ()
    list_s: Annotated[
        Seconds, Meta(description="longest pause between listings of the pool's keys")
    ] = 60.0
    verify_timeout_s: Annotated[
        Seconds, Meta(description="deadline for verifying what a decision would fetch")
    ] = 0.025

    @property
    def each(self) -> tuple[PoolConfig, ...]:
        """List the pools; one that is configured by `master` has no name."""
        if self.master is None:
            return self.pools
        return (PoolConfig(name="", master=self.master),)

    @property
    def names(self) -> tuple[str, ...]:
        """List the pools' names."""
        return tuple(pool.name for pool in self.each)


def pool_of(replica: ReplicaConfig, names: Sequence[str]) -> str | None:
    """Name the pool that a replica is in; None: none, or it does not say which of several."""
    if isinstance(replica.pool, str):
        return replica.pool if replica.pool in names else None
    return names[0] if replica.pool is not False and len(names) == 1 else None


class ForwardConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    connect_timeout_s: Annotated[Seconds, Meta(description="time to connect to a replica")] = 2.0
    first_byte_timeout_s: Annotated[
        Seconds,
        Meta(
            description="time to the first byte of the answer, without keep-alive comments; the "
            "router waits longer for a replica that works"
        ),
    ] = 600.0
    idle_timeout_s: Annotated[
        Seconds,
        Meta(
            description="longest silence inside an answer; the router waits longer for a replica "
            "that works"
        ),
    ] = 120.0
    early_stream_s: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(
            description="seconds of silence after which a stream starts with status 200 and "
            "keep-alives, for proxies that drop silent connections "
            "(docs/operate/failures.md). 0: never. Default: 15 for a stream that waits in the "
            "queue; others start with their first token"
        ),
    ] = None
    max_tries: Annotated[
        int, Meta(ge=1, description="replicas tried before the client gets an error")
    ] = 3
    retry_ratio: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="share of the requests of the last 10 s that may be sent again, beyond "
            "ten. Requests that one replica loses at the same time count as one",
        ),
    ] = 0.2
    keepalive_s: Annotated[
        Seconds,
        Meta(description="idle time of pooled connections; below the engine's own 5 s"),
    ] = 4.0
    max_connections: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(
            description="requests at replicas at once; more get 503. Default: what half of the "
            "file descriptors allow (ulimit -n)",
        ),
    ] = None
    ca_file: Annotated[Path | None, Meta(description="CA bundle for https replicas")] = None
    client_cert: Annotated[
        Path | None, Meta(description="certificate (PEM) to show to https replicas")
    ] = None
    client_key: Annotated[
        Path | None, Meta(description="its key (PEM); default: in the file of the certificate")
    ] = None
    routes: Annotated[
        tuple[str, ...],
        Meta(
            description="engine routes that clients may use, besides inference, models and tokens: "
            "/path, /prefix/* or METHOD /path. Routes that control an engine are never allowed"
        ),
    ] = ()
    client_fields: Annotated[
        tuple[ClientField, ...],
        Meta(
            description="fields that clients may send to engines although they are removed by "
            "default: " + ", ".join(FIELDS)
        ),
    ] = ()
    later_system_as_user: Annotated[
        bool,
        Meta(
            description="send system messages behind the conversation's first ones as the user's, "
            "for chat templates that take them in front only. This changes the body "
            "(docs/guides/agents.md#claude-code)"
        ),
    ] = False
    trusted_proxies: Annotated[
        tuple[str, ...],
        Meta(description="networks (CIDR) of proxies whose X-Forwarded-For is trusted"),
    ] = ()


class HealthConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    interval_s: Annotated[Seconds, Meta(description="pause between health probes")] = 2.0
    timeout_s: Annotated[Seconds, Meta(description="deadline of one probe")] = 5.0
    load_interval_s: Annotated[
        Seconds, Meta(description="pause between reads of an engine's /metrics")
    ] = 5.0
