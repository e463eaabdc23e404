"""A node that is not there: recorded hardware on real kernel links, and stand-ins for kubelet and the runtime.

What the demo needs; tests and benchmarks use it, too. The agent knows it only through `Host`.
"""
