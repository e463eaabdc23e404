"""Configurations as CNI plugins install them."""

from __future__ import annotations

CALICO = b"""{
  "name": "k8s-pod-network",
  "cniVersion": "0.3.1",
  "plugins": [
    {"type": "calico", "mtu": 0, "big": 123456789012345678901234567890, "float": 1e3, "\\u00e4": "\\ud83d\\ude00"},
    {
      "type": "bandwidth",
      "capabilities": {"bandwidth": true}
    }
  ],
  "plugins-": ["]"]
}
"""
BRIDGE = b'{"cniVersion": "1.0.0", "name": "b", "type": "bridge", "ipam": {"type": "host-local"}}\n'
