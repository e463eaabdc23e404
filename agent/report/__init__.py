"""What people and Prometheus see: metrics, status, page, endpoints, recent events, charts, doctor."""
