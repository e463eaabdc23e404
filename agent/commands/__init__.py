"""The commands, one module each: `add` puts it into the command line, and what it needs is imported when it runs."""
