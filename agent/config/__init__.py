"""The configuration: one YAML file, read into frozen values, with every problem listed at once.

Owns the types, their defaults and their rules. Whether a selector matches anything on a node is
`deviceplugin.resources`' business.
"""

from agent.config.cni import CniSettings
from agent.config.document import MAX_CONFIG_BYTES, Flags, describe, load, load_legible, parse
from agent.config.endpoints import Endpoints
from agent.config.health import HealthSettings
from agent.config.restart import Restart
from agent.config.topology import Topology
from agent.config.values import (
    BINDINGS,
    DEFAULT_SHARES,
    ENVIRONMENTS,
    KINDS,
    MIG_STRATEGIES,
    NETWORK_KINDS,
    PASS_BY,
    SHARED_MODES,
    Config,
    Network,
    RailNic,
    Resource,
    Select,
    SharedPool,
    SriovPool,
)
from agent.model.pf_selector import PfSelector, parse_pf

__all__ = [
    "BINDINGS",
    "DEFAULT_SHARES",
    "ENVIRONMENTS",
    "KINDS",
    "MAX_CONFIG_BYTES",
    "MIG_STRATEGIES",
    "NETWORK_KINDS",
    "PASS_BY",
    "SHARED_MODES",
    "CniSettings",
    "Config",
    "Endpoints",
    "Flags",
    "HealthSettings",
    "Network",
    "PfSelector",
    "RailNic",
    "Resource",
    "Restart",
    "Select",
    "SharedPool",
    "SriovPool",
    "Topology",
    "describe",
    "load",
    "load_legible",
    "parse",
    "parse_pf",
]
