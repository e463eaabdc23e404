"""What many agents ask of the API server, and what they weigh."""
