"""The DRA manager of the kubelet stand-in: plugins found by their sockets, claims prepared, slices wiped.

Behaves as kubelet 1.36.2 was seen to (pkg/kubelet/cm/dra, pkg/kubelet/pluginmanager), its faults included.
"""
