"""Addresses: the IPAM plugins that are run, and the leases that they give."""
