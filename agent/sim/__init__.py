"""A node that is not there: recorded hardware on real kernel links, and stand-ins for its peers.

The demo, the tests and the benchmarks use it. The agent knows it only through `Host`.
"""
