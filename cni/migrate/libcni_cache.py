"""What libcni remembers of the calls it made: the configuration as it was sent, and the result.

Runtimes keep it under /var/lib/cni/results, Multus under /var/lib/cni/multus/results, in one file for each
network, container and interface (libcni, "cniCacheV1"). The replaced plugins kept less: of the IPAM section
no more than its type, which is too little to give an address back with.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.errors import RequestInvalid
from agent.model.allocation import PodRef
from agent.model.fields import Fields, decode
from cni import netconf
from cni.migrate.files import Unreadable, fields_of, text_in
from cni.netconf import NetConf
from cni.result import check_result, in_version

FOLDERS = ("results", "multus/results")
KIND = "cniCacheV1"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CachedCall:
    """One ADD as it was made."""

    conf: NetConf | None
    """As the plugin got it; None if that cannot be told."""
    result: Mapping[str, Any] | None
    """Of the whole network, translated to the newest version."""
    netns_path: str
    cni_args: str
    pod: PodRef


def find(state: Path, kind: str, network: str, container_id: str, ifname: str) -> CachedCall | None:
    """Look a call to a plugin of a type up. None if it is not there, or not to be understood."""
    for folder in FOLDERS:
        file = state / folder / f"{network}-{container_id}-{ifname}"
        try:
            fields = fields_of(file)
            if fields is not None:
                return _call(fields, kind, network)
        except (Unreadable, RequestInvalid) as error:
            log.warning("%s is of no use: %s", file, error)
    return None


def without(content: bytes, take_out: Callable[[bytes], bytes | None]) -> bytes | None:
    """Take something out of the configuration in a file's content; None where there is nothing to take out.

    `take_out` does it to the configuration, and returns None or raises ValueError where there is nothing.
    """
    try:
        document = json.loads(content)
        if document["kind"] != KIND:
            return None
        changed = take_out(base64.b64decode(document["config"], validate=True))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if changed is None:
        return None
    return json.dumps({**document, "config": base64.b64encode(changed).decode()}).encode()


def _call(fields: Fields, kind: str, network: str) -> CachedCall:
    if text_in(fields, "kind") != KIND:
        raise RequestInvalid(f"kind must be {KIND}")
    pairs = fields.take("cniArgs", _are_pairs, "a list of pairs of texts") or []
    args = dict(pairs)
    result = fields.mapping("result")
    if result is not None:
        check_result(result, "result")
        result = in_version(result, netconf.SUPPORTED_VERSIONS[-1])
    return CachedCall(
        conf=_conf(fields, kind, network, args),
        result=result,
        netns_path=fields.text("netns", "", _is_path, "a path"),
        cni_args=";".join(f"{name}={value}" for name, value in pairs),
        pod=PodRef(args.get("K8S_POD_NAMESPACE", ""), args.get("K8S_POD_NAME", ""), args.get("K8S_POD_UID", "")),
    )


def _is_path(text: str) -> bool:
    return text.startswith("/")


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def _are_pairs(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair) for pair in value
    )


def _conf(fields: Fields, kind: str, network: str, args: Mapping[str, str]) -> NetConf | None:
    encoded = text_in(fields, "config")
    try:
        document = decode(base64.b64decode(encoded, validate=True), "config")
    except binascii.Error as error:
        raise RequestInvalid(f"config is not base64: {error}") from error
    outer = Fields(document, "config", fold=True)
    plugins = outer.take("plugins", _is_list, "a list")
    found = document if plugins is None else next((p for p in plugins if _is_of(p, kind)), None)
    if found is None:
        return None
    version = text_in(outer, "cniVersion")
    return netconf.from_document({"cniVersion": _known(version), **found, "name": network}, args)


def _is_of(plugin: Any, kind: str) -> bool:
    return isinstance(plugin, dict) and plugin.get("type") == kind


def _known(version: str) -> str | None:
    return version if version in netconf.SUPPORTED_VERSIONS else None
