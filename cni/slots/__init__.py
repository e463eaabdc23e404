"""Late binding: the devices of a pod's slots are chosen when the whole pod is known.

wishes     what each container has: its slots, and the GPUs that their devices should be near to
choice     which devices: the pure part
binder     asks what a pod has, and chooses
edits      what each slot brings into its container: the pure part
bound      keeps books and specs together, and lets go of both
keeping    writes specs again that somebody removes
lost       what slots were bound to before the books were lost: the pure part
"""
