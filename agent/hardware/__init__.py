"""The only users of pyroute2, pynvml, pyudev and raw kernel interfaces.

Plain synchronous adapters. Each takes its root or socket from outside, and translates its
library's errors into `agent.errors` at its edge.
"""
