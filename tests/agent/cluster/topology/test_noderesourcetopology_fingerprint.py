from __future__ import annotations

import random

from agent.cluster.topology.noderesourcetopology import fingerprint

PODS = [("ns1", "n1"), ("ns1", "n2"), ("ns2", "n1"), ("ns3", "n1"), ("ns3", "n2")]


def test_the_published_vector_is_reproduced() -> None:
    assert fingerprint(PODS) == "pfp0v001b92008c14168b3a6"


def test_the_order_of_pods_does_not_matter() -> None:
    shuffled = PODS[:]
    random.Random(1).shuffle(shuffled)
    assert fingerprint(shuffled) == fingerprint(PODS)


def test_namespace_and_name_cannot_be_confused() -> None:
    assert fingerprint([("a", "b")]) != fingerprint([("b", "a")])


def test_a_node_without_pods_has_a_fingerprint_too() -> None:
    assert fingerprint([]) == "pfp0v001ef46db3751d8e999"  # XXH64 of nothing, seed 0
