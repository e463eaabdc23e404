"""The configuration: one YAML file, read into frozen values, with every problem listed at once.

Owns the types, their defaults and their rules. Whether a selector matches anything on a node is
`agent.offer.units`' business.
"""

from agent.config.document import MAX_CONFIG_BYTES, Flags, describe, load, load_legible, parse
from agent.config.resources import ENVIRONMENTS, KINDS, RailNic, Resource, Select, SharedPool, SriovPool
from agent.config.sections import CniSettings, Dra, Endpoints, HealthSettings, Placement, Restart
from agent.config.topology import Topology
from agent.config.values import Config
from agent.model.pf_selector import PfSelector, parse_pf

__all__ = [
    "ENVIRONMENTS",
    "KINDS",
    "MAX_CONFIG_BYTES",
    "CniSettings",
    "Config",
    "Dra",
    "Endpoints",
    "Flags",
    "HealthSettings",
    "PfSelector",
    "Placement",
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
