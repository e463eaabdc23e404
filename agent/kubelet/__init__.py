"""What kubelet and the container runtime say: PodResources, checkpoint, configuration, sandboxes."""
