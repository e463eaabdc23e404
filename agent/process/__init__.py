"""What any daemon needs: checks at start, waiting for what is not there yet, threads, memory, heartbeat."""
