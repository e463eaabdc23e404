"""Programs on a real VF over its moves: what the kernel keeps, what is the pod's, and what is another agent's."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.hardware import tcx
from tests.cni.modes.programs import BPF_PROG_TYPE_SCHED_CLS, BPF_PROG_TYPE_XDP, BPF_XDP, attach, attached, hold, loaded
from tests.vm.adapters import MakePod, MakeVfs, Pf, ip, link, netdevs, run, wait_until
from tests.vm.direct import opened


@pytest.mark.parametrize("by_del", [True, False], ids=["DEL", "the namespace's end"])
def test_a_link_of_another_agent_comes_back_with_the_vf_and_stays_and_the_pods_program_goes(
    pfs: tuple[Pf, ...], vfs: MakeVfs, netns: MakePod, tmp_path: Path, by_del: bool
) -> None:
    address, pod = vfs(pfs[0], 1)[0], netns()
    with opened(tmp_path) as direct, loaded(BPF_PROG_TYPE_SCHED_CLS) as mine, loaded(BPF_PROG_TYPE_SCHED_CLS) as its:
        direct.add("c1", pod, address)
        index, where = link("net1", pod)["ifindex"], Path("/run/netns", pod)
        run("tc", "-n", pod, "qdisc", "add", "dev", "net1", "clsact")
        attach(where, index, its, tcx.BPF_TCX_EGRESS)
        with hold(where, index, mine, tcx.BPF_TCX_INGRESS):
            if by_del:
                direct.delete("c1", pod)
                assert "tcx" in direct.ledger.quarantines()[0].reason  # for all that is known, the pod holds it
            ip("netns", "delete", pod)
            wait_until("the VF in the host", lambda: netdevs(address))
            direct.heal(address)
            (name,) = netdevs(address)
            (left,) = attached(link(name)["ifindex"])
            assert left.link
            assert "clsact" not in run("tc", "qdisc", "show", "dev", name)
            assert (direct.ledger.attachments(), direct.ledger.quarantines()) == ((), ())
        assert attached(link(name)["ifindex"]) == ()


def test_an_xdp_link_of_another_agent_comes_back_with_the_vf_and_stays(
    pfs: tuple[Pf, ...], vfs: MakeVfs, netns: MakePod, tmp_path: Path
) -> None:
    address, pod = vfs(pfs[0], 1)[0], netns()
    with opened(tmp_path) as direct, loaded(BPF_PROG_TYPE_XDP) as program:
        direct.add("c1", pod, address)
        with hold(Path("/run/netns", pod), link("net1", pod)["ifindex"], program, BPF_XDP):
            ip("netns", "delete", pod)
            wait_until("the VF in the host", lambda: netdevs(address))
            direct.heal(address)
            (name,) = netdevs(address)
            assert "xdp" in link(name)
            assert (direct.ledger.attachments(), direct.ledger.quarantines()) == ((), ())
        assert "xdp" not in link(name)
