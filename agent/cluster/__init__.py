"""What the API server is told and asked: the client, published objects, labels, events, pods."""
