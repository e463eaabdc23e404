"""What is written to and read from the API server: the client, published objects, labels, events, pods."""
