"""`nodefabric run`: the agent."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Coroutine, MutableMapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent import config as configuration
from agent.commands.options import DONE, FAILED, Command, add_config, add_host, add_sources, open_host, sources
from agent.errors import AgentError, HardwareError
from agent.hardware import seccomp
from agent.operator import probe
from agent.process import interpreter, logs
from agent.process.identity import node_name
from agent.process.supervision import end_unless_called_again, supervised

if TYPE_CHECKING:
    from agent.cluster.apiserver import ApiServer
    from agent.cluster.node_taint import NodeTaint

STOP_SECONDS = 1.8
"""After this long a stuck driver or disk no longer holds up the end of the process."""
SWITCH_SECONDS = 0.0005

log = logging.getLogger("agent")


def add(command: Command) -> None:
    """Add the command."""
    parser = command("run", _run, "run the agent")
    add_config(parser)
    add_sources(parser)
    add_host(parser)
    text = "API server to publish to (default: the pod's own account)"
    parser.add_argument("--kubeconfig", type=Path, metavar="FILE", help=text)
    levels, formats = ("DEBUG", "INFO", "WARNING", "ERROR"), ("auto", "json", "text")
    parser.add_argument("--log-level", default="INFO", choices=levels, help="how much is logged (default: %(default)s)")
    parser.add_argument(
        "--log-format", default="auto", choices=formats, help="auto (the default): text on a terminal, else JSON"
    )


def _run(options: argparse.Namespace) -> int:
    interpreter.collect_seldom()
    logs.configure(sys.stderr, options.log_level, options.log_format)
    settle_grpc(os.environ)
    confine()
    # A scan computes on a thread of its own. With the usual 5 ms an ADD beside it would wait that long after each
    # of its system calls.
    sys.setswitchinterval(SWITCH_SECONDS)
    from agent.cluster.node_taint import DAEMON_SET, NodeTaint
    from agent.hardware.sysfs import rdma as sysfs_rdma
    from agent.inventory import Inventory
    from agent.main import Agent, Start
    from agent.process.startup import await_config

    files = sources(options, options.config)
    probe_socket = Path(found) if (found := os.environ.get(probe.SOCKET)) else None

    async def serve() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.set_default_executor(interpreter.workers_of_loop())
        taint = NodeTaint(partial(_api_server, options.kubeconfig), node_name(), os.environ.get(DAEMON_SET))
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, _stop, stop, taint)
        lifting = asyncio.create_task(supervised(taint.lift, "the Node's taint"), name="taint")
        host = open_host(options)
        inventory = Inventory(host, silent_changes=partial(sysfs_rdma.silent_changes, host.root))
        try:
            config = await await_config(files, inventory.begin, stop, probe_socket)
            if config is not None:
                log.info("configuration in effect: %s", configuration.describe(config))
                if not config.needs_api:
                    lifting.cancel()
                open_api = partial(_api_server, options.kubeconfig) if config.topology.needs_api else None
                open_claims = partial(_api_server, options.kubeconfig, for_many=True)
                start = Start(open_api, open_claims, files, probe_socket, end_unless_called_again)
                agent = Agent(config, host, inventory, taint, start)
                await agent.run(stop)
        finally:
            lifting.cancel()
            await inventory.close()
            host.close()

    run_bounded(serve())
    # The interpreter would wait for threads of pools, of which one may hang in a driver or on a disk.
    logging.shutdown()
    os._exit(DONE)


def confine() -> None:
    """Give up the system calls that the agent never needs, before anything else runs. Without a filter it works too."""
    try:
        seccomp.confine()
    except HardwareError as error:
        log.warning("the agent keeps all that its capabilities allow: %s", error)


def settle_grpc(environment: MutableMapping[str, str]) -> None:
    """Say how gRPC's core is to behave, before it is imported. What an administrator has said stays."""
    environment.setdefault("GRPC_VERBOSITY", "ERROR")  # it writes past Python's logging
    # Else it ends its threads at each fork(2), and aborts the process if it cannot have them again. An IPAM plugin is
    # started by vfork(2), but by fork where that fails (_posixsubprocess): on a node without a thread to spare.
    environment.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def run_bounded(work: Coroutine[Any, Any, None]) -> None:
    """Run to the end. After an error no thread that hangs in a driver or on a disk holds up the end of the process.

    `asyncio.run` waits for the threads of its executor without a limit, and raises only then.
    """

    async def ended() -> None:
        try:
            await work
        except AgentError:
            _end_soon()
            raise
        except Exception:
            log.exception("the agent ends by an error that nobody expected")
            _end_soon()
            raise

    asyncio.run(ended())


def _api_server(kubeconfig: Path | None, *, for_many: bool = False) -> ApiServer:
    """Open the API server. Raises ConfigError if that is not possible."""
    from agent.cluster.apiserver import SOME_AT_ONCE, ApiServer

    at_once = SOME_AT_ONCE if for_many else 1
    if kubeconfig is not None:
        return ApiServer.from_kubeconfig(kubeconfig, at_once)
    return ApiServer.in_cluster(os.environ, at_once=at_once)


def _stop(stop: asyncio.Event, taint: NodeTaint) -> None:
    """End. Asked for a second time, without leave."""
    _end_soon(0.0 if stop.is_set() else taint.leave_seconds)
    stop.set()


def _end_soon(after: float = 0.0) -> None:
    late = threading.Timer(after + STOP_SECONDS, os._exit, (FAILED,))
    late.daemon = True
    late.start()
