"""Registration with a kubelet that is late, restarts, loses a socket or ends a stream; sockets of earlier processes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from agent.config import Config
from agent.ledger import Ledger
from agent.state import Latest
from deviceplugin.plugins import DevicePlugins, Ground
from deviceplugin.registration import SOCKET_PATTERN, sweep
from hack.sim.pods import Container
from tests.awaiting import until
from tests.deviceplugin.rig import QUICK, VF_ONLY, all_counts, new_kubelet, plugins_on, rig, run
from tests.node import node


@contextlib.asynccontextmanager
async def early(folder: Path, kubelet_dir: Path) -> AsyncIterator[tuple[DevicePlugins, Callable[[], Awaitable[None]]]]:
    """Start device plugins before their kubelet; the test starts that, and it ends after them."""
    with contextlib.closing(Ledger.open(folder / "ledger.db", "boot")) as ledger:
        config = Latest(Config(resources=VF_ONLY, kubelet_dir=kubelet_dir, cdi_dir=folder / "cdi"))
        plugins = plugins_on(config, Ground(Latest(node()), ledger, all_counts()))
        async with contextlib.AsyncExitStack() as afterwards:

            async def start_kubelet() -> None:
                kubelet = new_kubelet(kubelet_dir)
                await kubelet.start()
                afterwards.push_async_callback(kubelet.close)

            running = asyncio.create_task(plugins.run())
            try:
                yield plugins, start_kubelet
            finally:
                await plugins.close()
                await running


def problem_of(plugins: DevicePlugins) -> str:
    return plugins.status()["rdma/vf"].problem


async def test_plugins_register_again_after_kubelet_has_restarted_and_pods_keep_their_units(short_folder: Path) -> None:
    async with rig(short_folder) as r:
        before = {s.socket for s in r.plugins.status().values()}
        first = await r.run_pod("first", Container("c", (("rdma/vf", 8),)))
        await r.kubelet.restart()
        assert r.allocatable() == {"nvidia.com/gpu": 0, "rdma/hca": 0, "rdma/vf": 0}
        await until(lambda: r.allocatable() == {"nvidia.com/gpu": 4, "rdma/hca": 16, "rdma/vf": 16})
        await until(lambda: r.plugins.ready)
        after = {s.socket for s in r.plugins.status().values()}
        assert not before & after
        assert {p.name for p in r.plugins.folder.glob("*.sock")} == {*after, "kubelet.sock"}
        second = await r.run_pod("second", Container("c", (("rdma/vf", 8),)))
        both = [*first["containers"][0]["devices"]["rdma/vf"], *second["containers"][0]["devices"]["rdma/vf"]]
        assert len(set(both)) == 16


@pytest.mark.parametrize("missing", ["device-plugins", "device-plugins/kubelet.sock"])
def test_a_kubelet_that_is_not_there_is_waited_for_and_logged_once(
    short_folder: Path, caplog: pytest.LogCaptureFixture, missing: str
) -> None:
    said = f"{missing} is missing: waiting for kubelet"
    if missing != "device-plugins":
        (short_folder / "kubelet/device-plugins").mkdir(parents=True)

    async def work() -> None:
        async with early(short_folder, short_folder / "kubelet") as (plugins, start_kubelet):
            await until(lambda: said in problem_of(plugins))
            await asyncio.sleep(2 * QUICK.retry.longest)
            assert not plugins.ready
            await start_kubelet()
            await until(lambda: plugins.ready)

    run(work())
    assert sum(said in r.message for r in caplog.records) == 1


async def test_a_kubelet_folder_with_too_long_a_name_is_named_with_the_remedy(short_folder: Path) -> None:
    folder = short_folder / ("x" * 80)
    (folder / "device-plugins").mkdir(parents=True)
    async with early(short_folder, folder) as (plugins, _):
        await until(lambda: "set a shorter kubeletDir" in problem_of(plugins))


async def test_a_stale_kubelet_socket_is_retried_until_kubelet_is_back(short_folder: Path) -> None:
    folder = short_folder / "device-plugins"
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(folder / "kubelet.sock"))
    async with early(short_folder, short_folder) as (plugins, start_kubelet):
        await until(lambda: "did not register" in problem_of(plugins))
        await start_kubelet()
        await until(lambda: plugins.ready)


async def test_the_old_stream_has_ended_before_the_next_registration(short_folder: Path) -> None:
    async with rig(short_folder, resources=VF_ONLY) as r:
        for round_ in range(1, 4):
            (r.plugins.folder / r.socket()).unlink()
            await until(lambda n=round_: len(r.calls("ListAndWatch")) == n + 1)  # type: ignore[misc]
            await until(lambda: r.plugins.ready)
        names = [c.name for c in r.calls("Register", "stream ended")]
        assert names == ["Register"] + ["stream ended", "Register"] * 3
        client = r.kubelet.registry.client("rdma/vf")
        assert client is not None
        await client.close()
        await until(lambda: len(r.calls("ListAndWatch")) == 5)
        await until(lambda: r.allocatable() == {"rdma/vf": 16})


async def test_sockets_that_a_killed_process_left_are_swept_and_live_ones_are_not(short_folder: Path) -> None:
    folder = short_folder / "device-plugins"
    folder.mkdir()
    dead, foreign = folder / "nodefabric-rdma-vf-00000000.sock", folder / "other.sock"
    for path in (dead, foreign):
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
    with socket.socket(socket.AF_UNIX) as live:
        live.bind(str(folder / "nodefabric-rdma-vf-11111111.sock"))
        live.listen()
        async with early(short_folder, short_folder) as (plugins, _):
            await until(lambda: plugins.status()["rdma/vf"].socket)
            own = plugins.status()["rdma/vf"].socket
            assert {p.name for p in folder.iterdir()} == {"nodefabric-rdma-vf-11111111.sock", "other.sock", own}
        assert {p.name for p in folder.iterdir()} == {"nodefabric-rdma-vf-11111111.sock", "other.sock"}


def left_behind(path: Path) -> Path:
    """Make a socket file that nobody listens on."""
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    return path


@pytest.fixture
def read_only(own_network: None, short_folder: Path) -> Iterator[Path]:
    """A folder that cannot be written, with a left socket in it. Mounts are the test run's own."""
    left_behind(short_folder / "nodefabric-a-1.sock")
    for options in (["--bind", str(short_folder), str(short_folder)], ["-o", "remount,bind,ro", str(short_folder)]):
        subprocess.run(["mount", *options], check=True)
    yield short_folder
    subprocess.run(["umount", str(short_folder)], check=True)


def test_a_process_that_takes_no_connections_does_not_hold_up_the_start(short_folder: Path) -> None:
    path = short_folder / "nodefabric-a-1.sock"
    with ExitStack() as stack:
        stuck = stack.enter_context(socket.socket(socket.AF_UNIX))
        stuck.bind(str(path))
        stuck.listen(0)
        waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
        waiting.connect(str(path))  # the queue is full now
        sweep(short_folder, SOCKET_PATTERN)
    assert path.exists()


def test_a_socket_that_cannot_be_removed_does_not_end_the_start(read_only: Path) -> None:
    sweep(read_only, SOCKET_PATTERN)
    assert (read_only / "nodefabric-a-1.sock").exists()
