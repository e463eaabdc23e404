"""The standard IPAM plugins, real and misbehaving."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agent.errors import IpamFailed
from cni.ipam import plugins as ipam
from cni.ipam.plugins import IpamCall, IpamKilled
from cni.ipam.program import VARIABLE
from tests.waiting import soon

PLUGINS = "/opt/cni/bin:/usr/lib/cni"


@pytest.fixture
def call(tmp_path: Path) -> IpamCall:
    return IpamCall("c1", "net1", "/var/run/netns/x", "IgnoreUnknown=1;K8S_POD_NAME=p", str(tmp_path))


def network(kind: str, **more: Any) -> dict[str, Any]:
    return {"cniVersion": "1.0.0", "name": "rails", "type": "nodefabric", "ipam": {"type": kind, **more}}


@pytest.fixture
def plugin(tmp_path: Path) -> Callable[[str], Path]:
    """Write a shell script as IPAM plugin `stub`."""

    def write(script: str) -> Path:
        file = tmp_path / "stub"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)
        return file

    return write


def test_the_plugin_is_told_of_the_call_and_nothing_else(
    tmp_path: Path, plugin: Callable[[str], Path], call: IpamCall
) -> None:
    plugin(f'env >{tmp_path}/env; cat >{tmp_path}/stdin; echo \'{{"ips": [{{"address": "10.0.0.2/24"}}]}}\'')
    document = network("stub")
    assert ipam.add(document, call).addresses == ("10.0.0.2/24",)
    env = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines())
    for shells_own in ("PWD", "SHLVL", "_", "OLDPWD"):
        env.pop(shells_own, None)
    env.pop(VARIABLE)
    assert env == {
        "CNI_COMMAND": "ADD",
        "CNI_CONTAINERID": "c1",
        "CNI_IFNAME": "net1",
        "CNI_NETNS": "/var/run/netns/x",
        "CNI_ARGS": "IgnoreUnknown=1;K8S_POD_NAME=p",
        "CNI_PATH": "/nonexistent",
        "PATH": "/bin:/usr/bin",
    }
    assert json.loads((tmp_path / "stdin").read_text()) == document


@pytest.mark.parametrize(
    ("script", "text", "code"),
    [
        ("""echo '{"code": 11, "msg": "no more addresses", "details": "x"}'; exit 1""", "no more addresses", 11),
        ("echo broken >&2; exit 1", "broken", None),
        (
            "(echo 'runtime: no new OS thread'; echo 'fatal error: x'; echo; seq 1 2000) >&2; exit 2",
            "runtime: no new OS thread\nfatal error: x",
            None,
        ),
        ("exit 3", "no message", None),
        ("echo garbage; exit 1", "no message", None),
        ("""echo '["list"]'; exit 1""", "no message", None),
        ("""echo '{"code": "x", "msg": {"a": 1}}'; exit 1""", "{'a': 1}", None),
        ("kill -9 $$", "no message", None),
        (r"printf '\377\376' >&2; exit 1", "\ufffd\ufffd", None),
    ],
)
def test_what_a_failing_plugin_says_is_passed_on(
    plugin: Callable[[str], Path], call: IpamCall, script: str, text: str, code: int | None
) -> None:
    plugin(script)
    with pytest.raises(IpamFailed) as caught:
        ipam.add(network("stub"), call)
    assert str(caught.value) == f"IPAM plugin stub: ADD failed: {text}"
    assert caught.value.code == code
    with pytest.raises(IpamFailed, match="DEL failed: "):
        ipam.delete(network("stub"), call)


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "[]",
        r"\377\376",
        '{"ips": null}',
        '{"ips": []}',
        '{"ips": [{"address": "10.0.0.2"}]}',
        '{"ips": [{"address": "10.0.0.2/24"}], "routes": [{"dst": 5}]}',
        '{"ips": [{"address": "10.0.0.2/24"}], "dns": ["x"]}',
    ],
)
def test_an_answer_that_cannot_be_used_is_an_error(plugin: Callable[[str], Path], call: IpamCall, answer: str) -> None:
    plugin(f"printf '{answer}'")
    wrong = r"without an address|what cannot be used: (ips|routes|dns).* must be "
    with pytest.raises(IpamFailed, match=f"IPAM plugin stub: answered ({wrong})"):
        ipam.add(network("stub"), call)
    ipam.delete(network("stub"), call)


@pytest.mark.parametrize("extra", ['"routes": null', '"routes": [{"dst": "10.1.0.0/16", "gw": ""}]', '"dns": null'])
def test_what_go_writes_for_nothing_is_fine(plugin: Callable[[str], Path], call: IpamCall, extra: str) -> None:
    plugin(f'echo \'{{"ips": [{{"address": "10.0.0.2/24", "gateway": null}}], {extra}}}\'')
    assert ipam.add(network("stub"), call).addresses == ("10.0.0.2/24",)


def test_a_plugin_that_hangs_is_killed_and_one_that_prints_for_ever_ends(
    plugin: Callable[[str], Path], call: IpamCall
) -> None:
    plugin("sleep 1000")
    with pytest.raises(IpamKilled, match="ADD did not end within 1 s, and was killed with"):
        ipam.add(network("stub"), call, 1)
    plugin("exec cat /dev/zero")
    with pytest.raises(IpamFailed, match=r"ADD failed: .*write error: Operation not permitted"):
        ipam.add(network("stub"), call)


def test_a_plugin_that_cannot_be_run_is_named(plugin: Callable[[str], Path], call: IpamCall) -> None:
    file = plugin("")
    file.chmod(0o644)
    with pytest.raises(IpamFailed, match="stub cannot be run: Permission denied"):
        ipam.add(network("stub"), call)
    file.write_text("#!/nonexistent/python\n")
    file.chmod(0o755)
    with pytest.raises(
        IpamFailed, match="stub cannot be run: its interpreter, loader or libraries are not in the agent"
    ):
        ipam.add(network("stub"), call)


def test_a_plugin_that_an_installer_is_writing_is_waited_for(plugin: Callable[[str], Path], call: IpamCall) -> None:
    file = plugin('echo \'{"ips": [{"address": "10.0.0.2/24"}]}\'')
    with file.open("ab") as opened, soon(0.3, opened.close):
        assert ipam.add(network("stub"), call).addresses == ("10.0.0.2/24",)


def test_a_plugin_that_knows_only_an_older_version_is_asked_in_that(
    tmp_path: Path, plugin: Callable[[str], Path], call: IpamCall
) -> None:
    plugin(
        f'd={tmp_path}; cat >$d/in; [ $CNI_COMMAND = VERSION ] && {{ echo \'{{"cniVersion": "1.0.0",'
        ' "supportedVersions": ["0.1.0", "0.2.0", "0.3.0", "0.3.1", "0.4.0"]}\'; exit; };'
        ' grep -q \'"cniVersion": "0.4.0"\' $d/in && { echo \''
        '{"cniVersion": "0.4.0", "ips": [{"version": "4", "address": "10.0.0.2/24"}]}\'; exit; };'
        ' echo \'{"code": 1, "msg": "incompatible CNI versions"}\'; exit 1'
    )
    assert ipam.add(network("stub"), call).addresses == ("10.0.0.2/24",)
    ipam.delete(network("stub"), call)


def test_a_plugin_of_no_common_version_is_named_with_those_it_knows(
    plugin: Callable[[str], Path], call: IpamCall
) -> None:
    plugin(
        '[ $CNI_COMMAND = VERSION ] && { echo \'{"supportedVersions": ["0.1.0", "0.2.0"]}\'; exit; };'
        ' echo \'{"code": 1, "msg": "incompatible"}\'; exit 1'
    )
    with pytest.raises(IpamFailed, match=r"IPAM plugin stub: knows CNI 0\.1\.0, 0\.2\.0 only: update it"):
        ipam.add(network("stub"), call)


def test_endless_complaints_are_cut(plugin: Callable[[str], Path], call: IpamCall) -> None:
    plugin("head -c 3000000 /dev/zero | tr '\\0' x >&2; echo end >&2; exit 1")
    with pytest.raises(IpamFailed, match=r"ADD failed: x{300}$"):
        ipam.add(network("stub"), call)


def test_a_missing_dhcp_daemon_is_named_with_what_to_do(tmp_path: Path) -> None:
    if shutil.which("dhcp", path=PLUGINS) is None:
        pytest.skip("the standard plugins are not installed (Debian: containernetworking-plugins)")
    document = network("dhcp", daemonSocketPath=str(tmp_path / "dhcp.sock"))
    with pytest.raises(IpamFailed, match=r"IPAM plugin dhcp: ADD failed: .*dial.*: its daemon does not run; start"):
        ipam.add(document, IpamCall("c1", "net1", "/var/run/netns/x", "", PLUGINS))


def test_configuration_that_the_agent_is_not_shown_is_named_with_what_to_do(
    plugin: Callable[[str], Path], call: IpamCall
) -> None:
    """The agent's container has only the folders of /etc/cni/net.d that its own networks name."""
    missing = "stat /etc/cni/net.d/whereabouts.d/whereabouts.kubeconfig: no such file or directory"
    plugin(f"""echo '{{"code": 999, "msg": "{missing}"}}'; exit 1""")
    with pytest.raises(IpamFailed, match=f"ADD failed: {missing}: .*cni.ipamFolders"):
        ipam.add(network("stub"), call)


def test_gc_and_status_reach_only_a_plugin_that_knows_them(
    tmp_path: Path, plugin: Callable[[str], Path], call: IpamCall
) -> None:
    script = (
        f"cat >{tmp_path}/in-$CNI_COMMAND; echo $CNI_COMMAND >>{tmp_path}/calls;"
        ' [ $CNI_COMMAND = VERSION ] && { echo \'{"supportedVersions": ["%s"]}\'; exit; };'
        ' [ $CNI_COMMAND = STATUS ] && { echo \'{"code": 50, "msg": "no range left"}\'; exit 1; }; exit 0'
    )
    plugin(script % "1.0.0")
    ipam.collect(network("stub"), call, [("c1", "net1")])
    ipam.status(network("stub"), call)
    assert (tmp_path / "calls").read_text().split() == ["VERSION", "VERSION"]
    plugin(script % "1.1.0")
    ipam.collect(network("stub"), call, [("c2", "net1"), ("c1", "net1")])
    sent = json.loads((tmp_path / "in-GC").read_text())
    assert sent["cniVersion"] == "1.1.0"
    kept = [{"containerID": "c1", "ifname": "net1"}, {"containerID": "c2", "ifname": "net1"}]
    assert [sent["cni.dev/valid-attachments"], sent["cni.dev/attachments"]] == [kept, kept]
    with pytest.raises(IpamFailed, match="STATUS failed: no range left") as caught:
        ipam.status(network("stub"), call)
    assert caught.value.code == 50


def test_an_older_plugin_is_asked_to_check_a_result_of_its_own_version(
    tmp_path: Path, plugin: Callable[[str], Path], call: IpamCall
) -> None:
    """Go's library takes no other: the one of the plugins of CNI 0.4.0 refuses a result that says 1.0.0."""
    plugin(
        f"d={tmp_path}; cat >$d/in; [ $CNI_COMMAND = VERSION ] &&"
        ' { echo \'{"supportedVersions": ["0.4.0"]}\'; exit; };'
        ' grep -q \'"cniVersion": "1.0.0"\' $d/in && { echo \'{"code": 1, "msg": "incompatible"}\'; exit 1; }; exit 0'
    )
    interfaces = [{"name": "net1", "mac": "02:00:00:00:00:01", "mtu": 1500, "pciID": "0000:3b:00.2"}]
    answered = {"cniVersion": "1.1.0", "interfaces": interfaces, "ips": [{"address": "10.0.0.2/24", "interface": 0}]}
    ipam.check(network("stub"), call, answered)
    assert json.loads((tmp_path / "in").read_text())["prevResult"] == {
        "cniVersion": "0.4.0",
        "interfaces": [{"name": "net1", "mac": "02:00:00:00:00:01"}],
        "ips": [{"address": "10.0.0.2/24", "interface": 0, "version": "4"}],
    }


def test_a_plugin_that_has_no_check_finds_nothing_wrong(plugin: Callable[[str], Path], call: IpamCall) -> None:
    """As whereabouts answers. CRI-O asks each pod right after its ADD, and would start none."""
    plugin('echo \'{"code": 999, "msg": "CNI CHECK method is not implemented"}\'; exit 1')
    ipam.check(network("stub"), call, {"cniVersion": "1.0.0"})
    plugin('echo \'{"code": 999, "msg": "10.0.0.2 is not leased"}\'; exit 1')
    with pytest.raises(IpamFailed, match=r"CHECK failed: 10\.0\.0\.2 is not leased"):
        ipam.check(network("stub"), call, {"cniVersion": "1.0.0"})


def test_check_is_not_asked_of_a_network_before_there_was_one(tmp_path: Path, plugin: Callable[[str], Path]) -> None:
    plugin(f"cat >{tmp_path}/in; exit 0")
    call = IpamCall("c1", "net1", "/x", "", str(tmp_path))
    ipam.check({**network("stub"), "cniVersion": "0.3.1"}, call, {"cniVersion": "0.3.1"})
    assert not (tmp_path / "in").exists()
    ipam.check(network("stub"), call, {"cniVersion": "1.1.0", "ips": []})
    assert json.loads((tmp_path / "in").read_text())["prevResult"] == {"cniVersion": "1.0.0", "ips": []}
