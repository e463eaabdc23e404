"""The command line."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent import config as configuration
from agent import logs
from agent.errors import AgentError, ConfigError, InUse, RequestInvalid, Unavailable
from cni import commands as commands_of_cni
from cni.commands import DEFAULT_RELAY

if TYPE_CHECKING:
    from agent.hardware.host import Host
    from agent.model.device import Snapshot
    from agent.topology.publisher import TopologyApi

DEFAULT_CONFIG = Path("/etc/nodefabric/config.yaml")
DONE, FAILED, WRONG_INPUT, NO_ANSWER, IN_USE = 0, 1, 2, 3, 4
EXIT_STATUSES = (
    "Exit statuses: 0 done, 1 something failed, 2 the configuration or the command line is wrong,"
    " 3 the agent does not answer, 4 a pod may still use the device."
)
SHOWN_DEVICES = 8
"""check-config names as many per line; its JSON names all."""
STOP_SECONDS = 1.8
"""After this long a stuck driver or disk no longer holds up the end of the process."""
SWITCH_SECONDS = 0.0005

log = logging.getLogger("agent")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except ConfigError as error:
        for problem in error.problems:
            print(f"{error.source}: {problem}", file=sys.stderr)
        return WRONG_INPUT
    except Unavailable as error:
        print(f"nodefabric: {error}", file=sys.stderr)
        return NO_ANSWER
    except InUse as error:
        print(f"nodefabric: {error}", file=sys.stderr)
        return IN_USE
    except RequestInvalid as error:
        print(f"nodefabric: {error}", file=sys.stderr)
        return WRONG_INPUT
    except AgentError as error:
        print(f"nodefabric: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # who read us has read enough
        return FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nodefabric", description="Kubernetes node agent for RDMA, SR-IOV and GPUs", epilog=EXIT_STATUSES
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and end")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Any, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    run = command("run", _run, "run the agent")
    _add_config(run)
    _add_host(run)
    run.add_argument("--kubeconfig", type=Path, help="API server to publish to (default: the pod's own account)")
    levels, formats = ("DEBUG", "INFO", "WARNING", "ERROR"), ("auto", "json", "text")
    run.add_argument("--log-level", default="INFO", choices=levels, help="default: %(default)s")
    run.add_argument("--log-format", default="auto", choices=formats, help="auto: text on a terminal, else JSON")

    demo = command("demo", _demo, "show the main job on a simulated node")
    demo.add_argument(
        "--node", default="h100-8gpu", help="recorded node with GPUs and VFs to simulate (default: %(default)s)"
    )
    demo.add_argument("--relay", type=Path, default=DEFAULT_RELAY, help="the CNI relay (default: %(default)s)")
    demo.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)

    status = command("status", _status, "show what the running agent offers, who holds what, and what is wrong")
    _add_config(status)
    _add_output(status)

    release = command("release", _release, "give a device back that is stuck or in quarantine")
    release.add_argument("device", metavar="DEVICE", help="PCI address, or name of the interface in the host")
    release.add_argument("--reason", required=True, help="why; it is logged")
    release.add_argument("--force", action="store_true", help="also take it from a pod, or forget what does not come")
    _add_config(release)
    _add_host(release)
    _add_output(release)

    topology = command("topology", _topology, "show how near GPUs and NICs are to each other")
    _add_hardware(topology)
    _add_output(topology)

    check = command("check-config", _check_config, "check a configuration and show what it selects on this node")
    check.add_argument("file", type=Path, metavar="FILE", help="the configuration, YAML")
    _add_hardware(check)
    _add_output(check)

    commands_of_cni.add(command)

    _add_output(command("version", _version, "show the version"))
    return parser


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, default=DEFAULT_CONFIG, help="default: %(default)s")


def _add_host(parser: argparse.ArgumentParser) -> Any:
    """Add the options of commands that change what they find: a recorded node is only to look at."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--root", type=Path, default=Path("/"), help="where /sys, /proc and /dev are (default: /)")
    where.add_argument("--simulate", type=Path, metavar="FOLDER", help="a simulated node, as the demo makes one")
    return where


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    _add_host(parser).add_argument("--node", help="a recorded node instead of this machine: its name, or a file")


def _add_output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", "-o", choices=("text", "json"), default="text", help="default: %(default)s")


def _host(options: argparse.Namespace) -> Host:
    if options.simulate is not None:
        from agent.sim.machine import SimulatedMachine

        if not (options.simulate / "gpus.json").is_file():
            raise ConfigError(str(options.simulate), ["is no simulated node: recorded ones are named with --node"])
        return SimulatedMachine.open(options.simulate)
    from agent.hardware.machine import Machine

    if not (options.root / "sys").is_dir():
        raise ConfigError(str(options.root), ["has no folder sys: name one that holds sys, proc and dev with --root"])
    return Machine.open(options.root, api_server=_address(os.environ.get("KUBERNETES_SERVICE_HOST", "")))


def _address(text: str) -> str | None:
    try:
        return str(ipaddress.ip_address(text))
    except ValueError:  # a host's name, or nothing
        return None


def _run(options: argparse.Namespace) -> int:
    logs.configure(sys.stderr, options.log_level, options.log_format)
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # gRPC's core writes past Python's logging
    # A scan computes on a thread of its own. With the usual 5 ms an ADD beside it would wait that long after each
    # of its system calls.
    sys.setswitchinterval(SWITCH_SECONDS)
    from agent.main import Agent
    from agent.startup import await_config

    async def serve() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _stop, stop)
        host = _host(options)
        try:
            config = await await_config(options.config, host.scan, stop)
            if config is not None:
                log.info("configuration in effect: %s", configuration.describe(config))
                await Agent(config, host, api=_api_server(config, options.kubeconfig)).run(stop)
        finally:
            host.close()

    asyncio.run(serve())
    return DONE


def _api_server(config: configuration.Config, kubeconfig: Path | None) -> TopologyApi | None:
    if not config.topology.publish:
        return None
    from agent.clients.apiserver import ApiServer

    return ApiServer.from_kubeconfig(kubeconfig) if kubeconfig is not None else ApiServer.in_cluster(os.environ)


def _stop(stop: asyncio.Event) -> None:
    stop.set()
    late = threading.Timer(STOP_SECONDS, os._exit, (FAILED,))
    late.daemon = True
    late.start()


def _demo(options: argparse.Namespace) -> int:
    from agent import demo

    if not options.relay.is_file():
        raise ConfigError(
            str(options.relay),
            ["is not there: `make demo` builds the CNI relay and names it; else name it with --relay"],
        )
    if not options.inside:
        demo.enter_namespaces(["--node", options.node, "--relay", str(options.relay)])
    return demo.run(options.node, options.relay)


def _status(options: argparse.Namespace) -> int:
    from agent import status

    config = configuration.load(options.config)
    try:
        document, outcome = _ask(config.endpoints), DONE
    except Unavailable as error:
        document, outcome = _from_books(config, error), NO_ANSWER
    _show(options, document, status.text(document, time.time()))
    return outcome


def _from_books(config: configuration.Config, error: Unavailable) -> dict[str, Any]:
    """Tell what the books hold while no agent answers."""
    from agent import status
    from agent.ledger import lock, reading
    from agent.main import agent_version, node_name

    problem = f"does not run; this is what its books hold ({config.ledger_path})"
    if lock.is_claimed(config.state_dir):
        problem = f"runs, but does not answer; this is what its books hold: {error}"
    found = reading.read(config.ledger_path)
    return status.without_agent(found, node=node_name(), version=agent_version(), problem=problem)


def _release(options: argparse.Namespace) -> int:
    from agent.release import release
    from cni.release import Wish

    logs.configure(sys.stderr, "WARNING", "auto")
    config = configuration.load(options.config)
    done = release(config, Wish(options.device, options.reason, options.force), lambda: _host(options))
    _show(options, {"device": options.device, "done": done}, done)
    return DONE


def _ask(endpoints: configuration.Endpoints) -> dict[str, Any]:
    host = f"[{endpoints.address}]" if ":" in endpoints.address else endpoints.address
    url = f"http://{host}:{endpoints.port}/status"
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            document: dict[str, Any] = json.load(answer)
    except (OSError, ValueError) as error:
        raise Unavailable(
            f"the agent does not answer at {url} ({error}): is it running with this configuration?"
        ) from error
    return document


def _topology(options: argparse.Namespace) -> int:
    from agent.topology import matrix

    with _snapshot(options) as snapshot:
        _show(options, matrix.as_document(snapshot), matrix.as_text(snapshot))
    return DONE


def _check_config(options: argparse.Namespace) -> int:
    from agent.startup import check
    from deviceplugin.resources import explain

    config = configuration.load(options.file)
    with _snapshot(options) as snapshot:
        check(config, snapshot)
        found = [explain(resource, snapshot) for resource in config.resources]
    lines = [f"{options.file} is sound"]
    for resource in found:
        lines.append(
            f"{resource.resource_name} ({resource.kind}): {len(resource.devices)} of {len(resource.candidates)}"
        )
        lines += [f"  {match.field} {match.text}: {_some(match.devices)}" for match in resource.selectors]
        lines.append(f"  takes {_some(resource.devices)}")
    if not found:
        lines.append("it has no resources: the agent would offer nothing")
    _show(options, {"resources": [asdict(resource) for resource in found]}, "\n".join(lines))
    return DONE


def _some(devices: Sequence[str]) -> str:
    rest = len(devices) - SHOWN_DEVICES
    return ", ".join([*devices[:SHOWN_DEVICES], *([f"and {rest} more"] if rest > 0 else [])]) or "nothing"


class _Version(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from agent.main import agent_version

        print(f"nodefabric {agent_version()}")
        parser.exit(DONE)


def _version(options: argparse.Namespace) -> int:
    from agent.main import agent_version

    _show(options, {"version": agent_version()}, f"nodefabric {agent_version()}")
    return DONE


@contextmanager
def _snapshot(options: argparse.Namespace) -> Iterator[Snapshot]:
    """Scan this machine, another root, or a recorded node."""
    if options.node is None:
        host = _host(options)
        try:
            yield host.scan()
        finally:
            host.close()
        return
    from agent.sim import recorded
    from agent.sim.machine import SimulatedMachine

    with tempfile.TemporaryDirectory(prefix="nodefabric-") as folder:
        path = (
            Path(options.node) if "/" in options.node or options.node.endswith(".json") else recorded.find(options.node)
        )
        SimulatedMachine.create(Path(folder) / "node", recorded.load(path), with_links=False)
        host = SimulatedMachine.open(Path(folder) / "node")
        try:
            yield host.scan()
        finally:
            host.close()


def _show(options: argparse.Namespace, document: Any, text: str) -> None:
    print(json.dumps(document, indent=1) if options.output == "json" else text)


if __name__ == "__main__":
    sys.exit(main())
