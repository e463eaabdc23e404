"""Late binding: the devices of a pod's slots are chosen when the whole pod is known.

wishes     what each container has: its slots, and the GPUs that their devices should be near to
choice     which devices: the pure part
binder     asks kubelet, writes books and CDI specs, and lets go again
checkpoint what kubelet keeps about init containers, which PodResources does not tell
"""
