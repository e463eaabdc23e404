"""What somebody does to the agent on purpose or by mistake, one module each, and what must not come of it."""
