"""The driver's sockets: how kubelet finds them, what becomes of them."""

from __future__ import annotations

import asyncio
import socket
import stat
from pathlib import Path

import pytest

from deviceplugin.dra.registration import Door, Driver
from proto.pluginregistration.v1 import api_pb2, api_pb2_grpc
from tests.awaiting import until
from tests.deviceplugin.dra.rig import DRIVER, POOL, QUICK, VF, FakeClaims, catalog, channel, opened, service, sockets


async def registered(registration: Path, ok: bool = True, error: str = "") -> api_pb2.PluginInfo:
    """Do as kubelet does with a socket that it finds."""
    async with channel(registration) as to_agent:
        stub: api_pb2_grpc.RegistrationAsyncStub = api_pb2_grpc.RegistrationStub(to_agent)
        info = await stub.GetInfo(api_pb2.InfoRequest(), timeout=1)
        await stub.NotifyRegistrationStatus(api_pb2.RegistrationStatus(plugin_registered=ok, error=error), timeout=5)
        return info


async def test_kubelet_is_told_where_the_driver_is_served_and_by_which_services(kubelet_folder: Path) -> None:
    async with opened(kubelet_folder) as door:
        before = door.problem
        assert "has not found the driver" in before
        (found,) = sockets(kubelet_folder, "plugins_registry")
        (served,) = sockets(kubelet_folder, "plugins", DRIVER)
        info = await registered(found)
        assert (info.type, info.name, info.endpoint) == ("DRAPlugin", DRIVER, str(served))
        assert list(info.supported_versions) == [
            "v1.DRAPlugin",
            "v1beta1.DRAPlugin",
            "v1.DRAResourceHealth",
            "v1alpha1.DRAResourceHealth",
        ]
        assert not door.problem


async def test_a_refused_registration_is_told(kubelet_folder: Path) -> None:
    async with opened(kubelet_folder) as door:
        (found,) = sockets(kubelet_folder, "plugins_registry")
        why = "no handler registered for plugin type: DRAPlugin"
        await registered(found, ok=False, error=why)
        assert door.problem
        assert door.problem == f"kubelet did not register the DRA driver nodefabric.io: {why}"
        await registered(found)
        assert not door.problem


async def test_sockets_and_folder_are_for_root_alone_and_their_names_new_each_time(kubelet_folder: Path) -> None:
    seen = []
    for _ in range(2):
        async with opened(kubelet_folder):
            both = [*sockets(kubelet_folder, "plugins", DRIVER), *sockets(kubelet_folder, "plugins_registry")]
            assert [stat.S_IMODE(path.stat().st_mode) for path in both] == [0o600, 0o600]
            assert stat.S_IMODE((kubelet_folder / "plugins" / DRIVER).stat().st_mode) == 0o700
            seen += both
        assert sockets(kubelet_folder, "plugins", DRIVER) == sockets(kubelet_folder, "plugins_registry") == []
    assert len(set(seen)) == 4


async def test_what_an_earlier_process_left_is_removed_and_what_is_others_stays(kubelet_folder: Path) -> None:
    def leave(path: Path) -> Path:
        path.parent.mkdir(exist_ok=True)
        with socket.socket(socket.AF_UNIX) as left:
            left.bind(str(path))
        return path

    stale = [
        leave(kubelet_folder / "plugins" / DRIVER / "dra-00c0ffee.sock"),
        leave(kubelet_folder / "plugins_registry" / f"{DRIVER}-00c0ffee-reg.sock"),
    ]
    kept = [
        leave(kubelet_folder / "plugins" / DRIVER / "other.sock"),
        leave(kubelet_folder / "plugins_registry" / f"{DRIVER}-x-00c0ffee-reg.sock"),
        leave(kubelet_folder / "plugins_registry" / "gpu.nvidia.com-reg.sock"),
    ]
    async with opened(kubelet_folder):
        await until(lambda: not any(path.exists() for path in stale))
        await until(lambda: len(sockets(kubelet_folder, "plugins_registry")) == 3)
    assert all(path.exists() for path in kept)


@pytest.mark.parametrize("which", ["plugins_registry", f"plugins/{DRIVER}"])
async def test_when_one_socket_is_removed_both_are_made_anew(which: str, kubelet_folder: Path) -> None:
    async with opened(kubelet_folder) as door:
        (found,) = sockets(kubelet_folder, "plugins_registry")
        (served,) = sockets(kubelet_folder, "plugins", DRIVER)
        await registered(found)
        sockets(kubelet_folder, which)[0].unlink()
        await until(lambda: door.problem)
        await until(lambda: sockets(kubelet_folder, "plugins_registry") not in ([], [found]))
        (newer,) = sockets(kubelet_folder, "plugins_registry")
        info = await registered(newer)
        assert [Path(info.endpoint)] == sockets(kubelet_folder, "plugins", DRIVER) != [served]
        assert not door.problem


async def test_it_waits_for_the_folders_of_kubelet(kubelet_folder: Path) -> None:
    (kubelet_folder / "plugins_registry").rmdir()
    door = Door(Driver(DRIVER, POOL, kubelet_folder), service(FakeClaims()), catalog(VF), QUICK)
    running = asyncio.ensure_future(door.run())
    await until(lambda: "waiting for kubelet" in door.problem)
    (kubelet_folder / "plugins_registry").mkdir()
    await until(lambda: sockets(kubelet_folder, "plugins_registry"))
    await registered(sockets(kubelet_folder, "plugins_registry")[0])
    assert not door.problem
    door.close()
    await running
    assert door.problem
