"""The fingerprint of a node's pods, by the rule of the NodeResourceTopology schedulers.

The scheduler trusts a NodeResourceTopology object only if the fingerprint in it equals the one
that it computes from its own list of the node's pods.
"""

from __future__ import annotations

from collections.abc import Iterable

from xxhash import xxh64_intdigest

PREFIX = "pfp0v001"
METHOD_ALL = "all"
"""Every pod counts, not only those with exclusive resources."""


def fingerprint(pods: Iterable[tuple[str, str]]) -> str:
    """Compute the fingerprint of pods, each given as (namespace, name), in any order."""
    hashes = sorted(xxh64_intdigest(name, seed=xxh64_intdigest(namespace)) for namespace, name in pods)
    return f"{PREFIX}{xxh64_intdigest(b''.join(value.to_bytes(8, 'little') for value in hashes)):016x}"
