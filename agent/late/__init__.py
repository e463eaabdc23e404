"""Late binding: the devices of a pod's slots are chosen when the whole pod is known.

wishes     what each container has: its slots, and the GPUs that their devices should be near to
choice     which devices: the pure part
binder     asks kubelet, chooses, and writes books and CDI specs
bound      keeps books and specs together, and lets go of both
lost       what slots were bound to before the books were lost: the pure part
checkpoint what kubelet keeps about init containers, which PodResources does not tell
"""
