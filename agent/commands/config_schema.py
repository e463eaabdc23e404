"""`nodefabric config-schema`: what a configuration may hold, for editors and checks in a pipeline."""

from __future__ import annotations

import argparse
import json

from agent.commands.options import DONE, Command


def add(command: Command) -> None:
    """Add the command."""
    command("config-schema", _config_schema, "print the JSON Schema of a configuration")


def _config_schema(options: argparse.Namespace) -> int:
    from agent.config.schema import json_schema

    print(json.dumps(json_schema(), indent=1))
    return DONE
