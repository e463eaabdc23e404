"""From a snapshot and the configuration to the units that kubelet is offered."""
