"""Stand-ins for the API server and the scheduler, for demo, tests and benchmarks."""
