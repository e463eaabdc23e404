"""Late binding: the devices of a pod's slots are chosen when the whole pod is known."""
