"""Stand-ins that tests and benchmarks need, and the product does not: the Kubernetes API server."""
