"""What the agent waits for at its start: above all a configuration that can be used."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from agent import config
from agent.config.files import Sources
from agent.errors import ConfigError, HardwareError
from agent.ledger.database import lock_folder
from agent.model.device import Snapshot
from agent.process import relay_file, startup
from agent.process.conditions import Conditions
from agent.process.startup import keep_listening, learn_boot_id, listen
from cni.attachment import Attachments
from cni.server import CniServer
from tests.agent.scanned import FakeHost, inventory_of
from tests.awaiting import until as awaited
from tests.node import node
from tests.waiting import until

URL = "http://127.0.0.1:9808"
GOOD = "resources: [{name: rdma/vf, kind: vf, select: {pf: [rail0]}, network: n}]\nnetworks: [{name: n, mtu: 9000}]\n"


def write_bad(folder: Path, more: str = "") -> Path:
    """Write a wrong configuration of an agent whose folders are in this one."""
    path = folder / "config.yaml"
    path.write_text(f"rescanSeconds: soon\nstateDir: {folder}/state\nrunDir: {folder}/run\n{more}")
    return path


async def scan() -> Snapshot:
    return node()


def get(page: str, url: str = URL) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url + page, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def await_config(path: Path, step: Callable[[], None]) -> config.Config | None:
    """Wait for a configuration, and take a step meanwhile."""

    async def run() -> config.Config | None:
        async with asyncio.timeout(startup.CONFIG_SECONDS + 30):
            waiting = asyncio.create_task(startup.await_config(Sources(path), scan, asyncio.Event()))
            await asyncio.to_thread(step)
            return await waiting

    return asyncio.run(run())


def until_served(url: str = URL) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            get("/healthz", url)
        except OSError:
            time.sleep(0.02)
        else:
            return
    raise AssertionError("no endpoints")


def test_a_bad_file_is_explained_where_it_has_its_endpoints_until_it_is_repaired(
    own_network: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = "http://127.0.0.2:9909"
    path = write_bad(tmp_path, "endpoints: {address: 0.0.0.0, port: 9909, status: everywhere, prot: 1}\n")
    problem = "rescanSeconds: must be a number of seconds from 1 to 3600, is 'soon'"
    unknown = "is not a known key here (did you mean 'port'?); known are: address, exporterNames, port, status"
    said = f"must be repaired: {path}: endpoints.prot: {unknown}; {problem}"
    rebound: list[int] = []

    def look() -> None:
        until_served(url)
        assert get("/healthz", url)[0] == 200
        status, text = get("/readyz", url)
        assert (status, problem in text) == (503, True)
        assert json.loads(get("/status", url)[1]) == {"ready": False, "obstacles": {"config": said}}
        assert "\nnodefabric_config_last_reload_success 0.0\n" in get("/metrics", url)[1]
        connection = HTTPConnection("127.0.0.2", 9909, timeout=10)
        connection.request("GET", "/status", headers={"Host": "rebound.example"})
        rebound.append(connection.getresponse().status)
        connection.close()
        path.write_text(GOOD)

    read = await_config(path, look)
    assert read is not None
    assert (read.source, [r.name for r in read.resources], rebound) == (str(path), ["rdma/vf"], [200])
    with pytest.raises(OSError, match="refused"):
        get("/healthz", url)
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert errors == [f"config: {said}"]


def test_a_node_that_cannot_be_read_is_waited_for(own_network: None, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(GOOD)
    errors = [HardwareError("/sys/class/net cannot be read: Too many open files")]

    async def scan_at_last() -> Snapshot:
        if errors:
            raise errors.pop()
        return node()

    async def run() -> config.Config | None:
        async with asyncio.timeout(30):
            return await startup.await_config(Sources(path), scan_at_last, asyncio.Event())

    assert asyncio.run(run()) is not None
    assert not errors


def test_relays_get_their_file_of_pods_as_soon_as_no_other_agent_serves(
    own_network: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path, lock = write_bad(tmp_path), lock_folder(tmp_path / "state")

    def look() -> None:
        until(lambda: "pods: another agent serves them" in caplog.text)
        assert not (tmp_path / "run").exists()
        os.close(lock)
        until((tmp_path / "run/cni.sock.pods").exists)
        path.write_text(GOOD)

    assert await_config(path, look) is not None


def test_being_stopped_ends_the_wait_for_a_missing_file(
    own_network: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_file, "write", lambda config: None)  # its folders are the machine's own

    async def run() -> config.Config | None:
        stop = asyncio.Event()
        waiting = asyncio.create_task(startup.await_config(Sources(tmp_path / "missing.yaml"), scan, stop))
        await asyncio.to_thread(until_served)
        assert "cannot be read: No such file" in (await asyncio.to_thread(get, "/readyz"))[1]
        stop.set()
        async with asyncio.timeout(30):
            return await waiting

    assert asyncio.run(run()) is None


def test_resources_that_select_one_device_are_wrong_for_this_node() -> None:
    text = "resources: [{name: a/one, kind: vf, select: {pf: [rail0]}}, {name: a/two, kind: vf}]"
    with pytest.raises(ConfigError) as caught:
        startup.check(config.parse(text, "test.yaml"), node())
    assert any("a/one" in p and "a/two" in p for p in caught.value.problems)


def test_a_network_of_whole_adapters_must_suit_them() -> None:
    text = "resources: [{name: rdma/nic, kind: nic, network: n}]\nnetworks: [{name: n, mtu: 9000%s}]\n"
    startup.check(config.parse(text % "", "good.yaml"), node())
    with pytest.raises(ConfigError, match=r"networks\[0\], for rdma/nic: vlan has no effect in mode nic"):
        startup.check(config.parse(text % ", vlan: 7", "bad.yaml"), node())


def test_a_node_without_hardware_has_no_say_in_the_configuration() -> None:
    startup.check(config.parse(GOOD, "test.yaml"), replace(Snapshot(), generation=1))


@pytest.mark.parametrize(("key", "value"), [("mac", "02:00:00:00:00:07"), ("guid", "02:00:00:00:00:00:00:07")])
def test_an_address_of_its_own_is_for_a_network_that_one_vf_joins(key: str, value: str) -> None:
    network = f'networks: [{{name: n, {key}: "{value}"}}]\n'
    with pytest.raises(ConfigError, match=rf"networks\[0\]\.{key}: \d+ VFs would get the same one"):
        startup.check(config.parse(GOOD.partition("networks")[0] + network, "many.yaml"), node())
    one = "resources: [{name: rdma/vf, kind: vf, select: {pf: ['rail0#0']}, network: n}]\n"
    startup.check(config.parse(one + network, "one.yaml"), node())


def server_in(run: Path) -> CniServer:
    """Make a server that nobody asks anything."""
    return CniServer(
        run / "cni.sock",
        cast(Attachments, SimpleNamespace(add=None, delete=None)),
        condition=lambda: None,
        observe=lambda command: contextlib.nullcontext(),
    )


async def test_who_is_stopped_waits_no_longer(short_folder: Path) -> None:
    (short_folder / "run").write_text("in the way")
    server = server_in(short_folder / "run")
    conditions = Conditions()
    stop = asyncio.Event()
    waiting = asyncio.create_task(listen(server.start, conditions, stop))
    await awaited(lambda: "cni" in conditions.found)
    stop.set()
    await waiting


def test_a_socket_that_somebody_removes_is_made_anew(short_folder: Path) -> None:
    run, conditions = short_folder / "run", Conditions()
    server = server_in(run)
    server.start()

    async def scenario() -> None:
        keeping = asyncio.create_task(keep_listening(server.stands, server.listen_again, conditions))
        shutil.rmtree(run)
        run.write_text("in the way")
        await awaited(lambda: f"{run}/cni.sock: cannot be made: " in conditions.found.get("cni", ""))
        run.unlink()
        await awaited((run / "cni.sock").is_socket)
        await awaited(lambda: "cni" not in conditions.found)
        keeping.cancel()

    try:
        asyncio.run(scenario())
    finally:
        server.close()


async def test_a_node_that_cannot_be_read_is_told_and_waited_for() -> None:
    host, conditions = FakeHost(error=HardwareError("/sys cannot be read: Too many open files")), Conditions()
    waiting = asyncio.create_task(learn_boot_id(inventory_of(host), conditions, Path("/"), asyncio.Event()))
    await awaited(lambda: "Too many open files" in conditions.found.get("hardware", ""))
    host.error = None
    assert await waiting == "a"
    assert "hardware" not in conditions.found
