"""Debian's Open MPI runs on two pods by what their containers are told: as daemonset/examples/volcano-mpi-roce.yaml."""

from __future__ import annotations

import shlex
from pathlib import Path

from tests.vm.adapters import MakePod, Pf, ip, run
from tests.vm.containers import Container
from tests.vm.test_told import HCAS, Scene, packets
from tests.vm.test_told import scene as scene

SECONDS = 110
"""How long a process of MPI may live. The emulated processor needs 15 for all of it, half of that to load libraries."""
ROUNDS = 200
CLUSTER = ("10.96.0.1", "10.96.0.2")

PROGRAM = f"""\
import mpi4py
mpi4py.rc.threads = False  # one will do, and not each UCX can serve several
from mpi4py import MPI

world = MPI.COMM_WORLD
other = 1 - world.rank
for size, rounds in ((8, {ROUNDS}), (64 << 10, 20)):
    mine, theirs = bytes([world.rank + 1]) * size, bytearray(size)
    for _ in range(rounds):
        world.Sendrecv(mine, other, recvbuf=theirs, source=other)
    assert theirs == bytes([other + 1]) * size
print(f"rank {{world.rank}} on {{MPI.Get_processor_name()}}: {{world.allreduce(world.rank + 1)}}", flush=True)
"""


def cable(pods: tuple[str, str]) -> None:
    """Give two pods an eth0 each: the cluster's network, by which MPI starts its ranks."""
    run("modprobe", "veth")
    ip("-n", pods[0], "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", pods[1])
    for pod, address in zip(pods, CLUSTER, strict=True):
        ip("-n", pod, "address", "add", f"{address}/24", "dev", "eth0")
        for name in ("lo", "eth0"):
            ip("-n", pod, "link", "set", name, "up")


def secure_shell(container: Container, folder: Path) -> Path:
    """Write what stands for ssh: it runs a command in a container, with the variables that the container has."""
    program, command = folder / "shell", folder / "command"
    there = shlex.join(container.argv(f"exec timeout -k 5 {SECONDS} sh {command}"))
    program.write_text(f'#!/bin/sh\nshift\necho "$*" > {command}\nexec {there}\n')
    program.chmod(0o755)
    return program


def test_open_mpi_talks_over_the_adapters_that_its_pods_were_told(
    scene: Scene, pfs: tuple[Pf, ...], netns: MakePod, tmp_path: Path
) -> None:
    pods = netns(), netns()
    first, second = (scene.start(pod, pf) for pod, pf in zip(pods, pfs, strict=True))
    assert [pod.env["UCX_NET_DEVICES"] for pod in (first, second)] == [f"{hca}:1" for hca in HCAS]
    cable(pods)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    before = [packets(hca) for hca in HCAS]
    # Ranks that wait are to leave the one processor to those that work, and none is bound to it. Without a session
    # left attached Open MPI's daemon would outlive the shell that started it.
    how = f"--mca plm_rsh_agent {secure_shell(second, tmp_path)} --leave-session-attached --bind-to none"
    how += ' --mca oob_tcp_if_include "${NCCL_SOCKET_IFNAME#=}" --mca mpi_yield_when_idle 1'
    what = f"--mca pml ucx --mca btl ^openib,tcp /usr/bin/python3 {program}"
    mpirun = f"mpirun --allow-run-as-root --host {','.join(CLUSTER)} -np 2 {how} {what}"
    said = first.run(f"exec timeout -k 5 {SECONDS} {mpirun}", SECONDS + 8)
    assert all(f"rank {n} on {pod}: 3" in said for n, pod in enumerate(pods))
    for hca, earlier in zip(HCAS, before, strict=True):
        assert all(now > then + ROUNDS for now, then in zip(packets(hca), earlier, strict=True))
