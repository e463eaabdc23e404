from __future__ import annotations

from agent.process.identity import node_name


def test_the_node_has_the_name_that_kubelet_gives_it() -> None:
    assert node_name({"NODE_NAME": "gpu-7.example"}, lambda: "GPU-7") == "gpu-7.example"
    assert node_name({}, lambda: "GPU-7") == "gpu-7"  # names of objects have no capitals (RFC 1123)
    assert node_name({"NODE_NAME": ""}, lambda: "gpu-7") == "gpu-7"
