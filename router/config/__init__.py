"""The one configuration tree: sections, defaults, units; and how it is read.

    ports, replicas, discovery, routing, redis, prefill, observers, experiments
              the sections, by subject                              `ListenConfig`, …
    tree      all sections; each leaf as an option                  `Config`, `options`
    loader    defaults, YAML file, variables, --set, flags                `load`
    refused   every value that a type refuses, in words             `refused`
    yaml_file what all files in YAML have in common                 `yaml_file.parse`
    checks    what types cannot say                                 `check_replica`
    exposure  who can reach the public port without a key           `open_to`
    schema    the JSON Schema of a file, for editors                `json_schema`
    hosts     patterns of hosts that may be named at run time       `HostRules`
    secrets   files with an API key, the admin token                `read_secret`

A default exists in one place, the Struct field. Unknown keys are refused with the nearest known
one. No other module reads the environment; a module receives its section, not the whole. What other
rooms use is exported here.
"""

from router.config import yaml_file
from router.config.checks import check_pool, check_replica, check_replica_list
from router.config.discovery import DiscoveryConfig
from router.config.loader import load, read_yaml
from router.config.observers import TracingConfig
from router.config.ports import (
    ADMIN_TOKEN,
    ADMIN_TOKEN_FILE,
    ADMIN_URL,
    AdminConfig,
    LimitsConfig,
    ListenConfig,
)
from router.config.prefill import PrefillConfig, bootstrap_of
from router.config.redis import REDIS_PASSWORD, RedisConfig, redis_password
from router.config.refused import explained
from router.config.replicas import (
    EventsConfig,
    ForwardConfig,
    HealthConfig,
    MooncakeConfig,
    PoolConfig,
    ReplicaConfig,
    pool_of,
)
from router.config.routing import (
    EarlyConfig,
    IndexConfig,
    PolicyConfig,
    QueueConfig,
    SessionConfig,
    TokensConfig,
)
from router.config.tree import SECTIONS, Config, Option, options

__all__ = [
    "ADMIN_TOKEN",
    "ADMIN_TOKEN_FILE",
    "ADMIN_URL",
    "REDIS_PASSWORD",
    "SECTIONS",
    "AdminConfig",
    "Config",
    "DiscoveryConfig",
    "EarlyConfig",
    "EventsConfig",
    "ForwardConfig",
    "HealthConfig",
    "IndexConfig",
    "LimitsConfig",
    "ListenConfig",
    "MooncakeConfig",
    "Option",
    "PolicyConfig",
    "PoolConfig",
    "PrefillConfig",
    "QueueConfig",
    "RedisConfig",
    "ReplicaConfig",
    "SessionConfig",
    "TokensConfig",
    "TracingConfig",
    "bootstrap_of",
    "check_pool",
    "check_replica",
    "check_replica_list",
    "explained",
    "load",
    "options",
    "pool_of",
    "read_yaml",
    "redis_password",
    "yaml_file",
]
