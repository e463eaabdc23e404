"""Pure values and decisions about devices. No I/O; imports nothing of ours but errors."""
