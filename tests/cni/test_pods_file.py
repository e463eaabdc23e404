"""Which pods may have something that comes into their network, by a grant or a claim: what is on file, and when."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agent.config import Config, RailNic, Resource
from agent.errors import LedgerError
from agent.kubelet import checkpoint
from agent.ledger import Ledger
from agent.model.allocation import Claim, ClaimRef, ClaimState, Hold, PodRef
from agent.state import Latest
from cni import pods_file
from cni.pods_file import PodsFile, content_of, may_join, name_of
from tests import versions
from tests.cni.small_disk import disk
from tests.node import attach, bound_slot, claimed, granted, open_books, owner

BOOT = "6b3c2f1e-0000-4000-8000-000000000001"
VF, OTHER = "0000:3b:00.2", "0000:3b:00.3"
HCA = "0000:18:00.0"
VFS, GPUS, SHARES = Resource("rdma/vf", "vf"), Resource("nvidia.com/gpu", "gpu"), Resource("rdma/hca", "hca")
RESOURCES = (VFS, GPUS, SHARES)
SHARES_OF_A_NETWORK = replace(SHARES, network="n")
TRAINER, WEB = PodRef("default", "trainer"), PodRef("shop", "web")


@pytest.fixture
def books(tmp_path: Path) -> Iterator[Ledger]:
    with open_books(tmp_path) as books:
        yield books


@pytest.fixture
def path(short_folder: Path) -> Path:
    return short_folder / "run/cni.sock.pods"


def open_holders(path: Path, books: Ledger, *, config: Latest[Config] | None = None, is_new: bool = False) -> PodsFile:
    """Open the file of a ledger that agrees with kubelet."""
    made = PodsFile(path, BOOT, books, config or Latest(Config(resources=RESOURCES, kubelet_dir=path.parent.parent)))
    made.look()
    if not is_new:
        made.complete()
    return made


def named(path: Path) -> list[str]:
    """List what the file says of pods; it must be whole."""
    content = path.read_bytes()
    assert pods_file.is_of_boot(content, BOOT)
    assert path.stat().st_mode & 0o777 == 0o600
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    first, second, unknown, *names, last = content.decode().splitlines()
    assert (first, second, last) == ("nodefabric-pods 2", f"boot {BOOT}", "end")
    return [*(["?"] if unknown == "unknown 1" else []), *names]


GPU = "GPU-6b3fd5a0-0000-4000-8000-000000000000"
SLOT = "slot-rdma:vf-0-3"
SHARE = "hca-0c42a10300651234-7"
RAIL = f"rail-{GPU}"


def note(path: Path, *pods: str | None, resource_name: str = "rdma/vf", unit_id: str = VF) -> None:
    """Have kubelet's checkpoint count a unit to pods (UIDs); None for a file that cannot be read."""
    file = path.parent.parent / checkpoint.FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    entries = [
        {"PodUID": pod, "ContainerName": "c", "ResourceName": resource_name, "DeviceIDs": {"0": [unit_id]}}
        for pod in pods
    ]
    file.write_text("{" if None in pods else json.dumps({"Data": {"PodDeviceEntries": entries}, "Checksum": 1}))


# ------------------------------------------------------------------------ words


def unit(key: str, *devices: str) -> Hold:
    return Hold(key, "rdma/any", devices)


def of_claim(kind: str, **more: Any) -> Hold:
    made = claimed(
        "r", "node", "d", f"rdma/{kind}", kind, HCA if kind == "hca" else VF, "name", exclusive=kind != "hca"
    )
    return replace(made, claim_uid="uid-claim", **more)


@pytest.mark.parametrize(
    ("resource", "hold", "expected"),
    [
        (VFS, unit(VF, VF), True),
        (Resource("rdma/nic", "nic"), unit(HCA, HCA), True),
        (Resource("rdma/rail", "rail"), unit(RAIL, VF), True),
        (Resource("rdma/rail", "rail", nic=RailNic("hca")), unit(RAIL, HCA), False),
        (Resource("rdma/rail", "rail", nic=RailNic("hca"), network="n"), unit(RAIL, HCA), True),
        (SHARES, unit(SHARE, HCA), False),
        (SHARES_OF_A_NETWORK, unit(SHARE, HCA), True),
        (GPUS, unit(GPU, GPU), False),
        (Resource("amd.com/xpu", "accelerator"), unit("0000:c1:00.0", "0000:c1:00.0"), False),
        (VFS, unit(SLOT), True),
        (GPUS, unit(SLOT), True),
        (None, unit(SLOT, VF), True),
        (None, unit(VF, VF), True),
        (None, unit(RAIL, VF), True),
        (None, unit(SHARE, HCA), False),
        (None, unit(GPU, GPU), False),
        (None, unit("MIG-6b3fd5a0", "MIG-6b3fd5a0"), False),
        (VFS, of_claim("vf"), True),
        (Resource("rdma/nic", "nic"), of_claim("nic"), True),
        (VFS, of_claim("vf", admin=True), False),
        (SHARES, of_claim("hca"), False),
        (SHARES_OF_A_NETWORK, of_claim("hca"), True),
        (SHARES, of_claim("hca", network={"mode": "macvlan"}), True),
        (None, of_claim("hca"), True),
        (None, of_claim("vf"), True),
    ],
)
def test_what_may_join_a_network(resource: Resource | None, hold: Hold, expected: bool) -> None:
    assert may_join(resource, hold) is expected


def test_a_pod_is_named_by_what_each_call_about_it_says() -> None:
    assert name_of(PodRef("ns", "p", "u"), "c") == "ns/p"
    assert name_of(PodRef("", "", "u"), "c") == "c"
    assert name_of(PodRef("", "", "u")) == "u"
    assert name_of(PodRef("", "")) is None
    assert name_of(None) is None


# ----------------------------------------------------------------- what is on file


def test_a_grant_is_somebodys_unknown_until_its_pod_is(books: Ledger, path: Path) -> None:
    open_holders(path, books)
    assert named(path) == []
    books.grant(granted("rdma/vf", {VF: VF}))
    assert named(path) == ["?"]
    books.bind([VF], TRAINER)
    assert named(path) == ["default/trainer"]
    books.grant(granted("rdma/vf", {VF: VF, OTHER: OTHER}))  # kubelet frees units without a word
    assert named(path) == ["?"]
    books.bind([VF], WEB)
    assert named(path) == ["?", "shop/web"]
    books.bind([OTHER], WEB)
    assert named(path) == ["shop/web"]
    books.release([VF])
    assert named(path) == ["shop/web"]
    books.release([OTHER])
    assert named(path) == []


def give_unit(books: Ledger) -> None:
    books.grant(granted("rdma/vf", {VF: VF}))


def prepare(books: Ledger) -> None:
    books.prepare_claim(claim())


of_both = pytest.mark.parametrize("give", [give_unit, prepare])


@of_both
def test_the_file_says_so_before_the_books_do(books: Ledger, path: Path, give: Callable[[Ledger], None]) -> None:
    open_holders(path, books)
    seen: list[list[str]] = []

    def look(before: Hold | None, after: Hold | None) -> None:
        seen.append(named(path))

    books.watch_holds(look)
    give(books)
    assert seen == [["?"]]


@of_both
def test_a_grant_that_the_books_refuse_leaves_nobody_behind(
    own_network: None, tmp_path: Path, path: Path, give: Callable[[Ledger], None]
) -> None:
    with disk(tmp_path / "books", "size=4m"), open_books(tmp_path / "books") as books:
        open_holders(path, books)
        fill(tmp_path / "books")
        with pytest.raises(LedgerError, match="full"):
            give(books)
        assert named(path) == []


def test_rows_and_bound_slots_name_pods_without_a_grant(books: Ledger, path: Path) -> None:
    opened = open_holders(path, books)
    row = attach(books, VF, owner("c1"))
    opened.look()
    assert named(path) == ["default/trainer"]
    books.finish_detach(row)
    assert named(path) == []
    nameless = replace(owner("c2"), pod=PodRef("", ""))
    row = books.adopt(replace(row, owner=nameless))
    assert named(path) == ["c2"]
    books.finish_detach(row)
    (bound,) = books.bind_slots([bound_slot(SLOT, "rdma/vf", "vf", VF, "main", "c3", "eth0", WEB, {})])
    assert named(path) == ["shop/web"]
    books.unbind([bound])
    assert named(path) == ["shop/web"]  # its next sandbox has it bound anew
    books.release([SLOT])
    assert named(path) == []
    books.bind_slots([bound_slot(SLOT, "rdma/vf", "vf", VF, "", "", "", None, {})])
    assert named(path) == ["?"]


def test_kubelets_notes_count_for_as_long_as_they_say(books: Ledger, path: Path) -> None:
    """A kubelet that has started anew while the API server is away lists no pods, and their grants end."""
    note(path, "uid-1")
    opened = open_holders(path, books)
    assert named(path) == ["uid-1"]
    note(path, None)
    opened.look()
    assert named(path) == ["uid-1"]  # they could not be read
    note(path, "uid-2")
    opened.look()
    assert named(path) == ["uid-2"]
    note(path)
    opened.look()
    assert named(path) == []


def test_only_what_comes_into_a_network_counts_of_kubelets_notes(books: Ledger, path: Path) -> None:
    note(path, "uid-1", resource_name="nvidia.com/gpu")
    opened = open_holders(path, books)
    assert named(path) == []
    note(path, "uid-2", resource_name="rdma/gone", unit_id="slot-rdma:gone-0-0")
    opened.look()
    assert named(path) == ["uid-2"]


def test_another_configuration_decides_what_a_share_is_for(books: Ledger, path: Path) -> None:
    config = Latest(Config(resources=RESOURCES, kubelet_dir=path.parent))
    open_holders(path, books, config=config)
    books.grant(granted("rdma/hca", {SHARE: HCA}))
    books.bind([SHARE], TRAINER)

    def reconfigure(*resources: Resource) -> None:
        config.set(replace(config.value, resources=resources))

    reconfigure(replace(SHARES, network="shared"))
    assert named(path) == ["default/trainer"]
    reconfigure(SHARES)
    assert named(path) == []
    reconfigure()
    books.grant(granted("rdma/vf", {VF: VF}))
    books.bind([VF], TRAINER)
    assert named(path) == ["default/trainer"]  # what its resource was, nobody knows


def test_a_file_that_somebody_removes_is_written_again(books: Ledger, path: Path) -> None:
    opened = open_holders(path, books)
    path.unlink()
    opened.look()
    assert named(path) == []


# --------------------------------------------------------------------- what counts


def test_there_is_no_file_until_the_books_have_agreed_with_kubelet_once(books: Ledger, path: Path) -> None:
    opened = open_holders(path, books, is_new=True)
    books.grant(granted("rdma/vf", {VF: VF}))
    assert not path.exists()
    opened.complete()
    assert named(path) == ["?"]


def test_another_agent_of_the_same_boot_goes_on_where_the_last_was_killed(tmp_path: Path, path: Path) -> None:
    with open_books(tmp_path) as books:
        open_holders(path, books)
        books.grant(granted("rdma/vf", {VF: VF}))
        books.bind([VF], TRAINER)
    path.write_bytes(content_of(BOOT, [None]))  # as if killed between the file and the books
    with open_books(tmp_path) as books:
        open_holders(path, books, is_new=True)
        assert named(path) == ["default/trainer"]


@pytest.mark.parametrize("content", [content_of("another", []), content_of(BOOT, [])[:-1], b""])
def test_a_file_of_another_boot_or_half_a_one_goes(tmp_path: Path, path: Path, content: bytes) -> None:
    with open_books(tmp_path):
        pass
    path.parent.mkdir()
    path.write_bytes(content)
    with open_books(tmp_path) as books:
        open_holders(path, books, is_new=True)
        assert not path.exists()


# ------------------------------------------------------------------- no room for it


def test_a_file_that_cannot_be_written_goes_and_comes_again(own_network: None, books: Ledger, path: Path) -> None:
    with disk(path.parent, "size=16k"):
        opened = open_holders(path, books)
        filler = fill(path.parent)
        books.grant(granted("rdma/vf", {VF: VF}))  # its page is free then
        content = path.read_bytes()
        filler.unlink()
        assert (content, named(path)) == (path.read_bytes(), ["?"])
        path.unlink()
        fill(path.parent)
        books.bind([VF], TRAINER)
        assert [each.name for each in path.parent.iterdir()] == ["filler"]
        filler.unlink()
        opened.look()
        assert named(path) == ["default/trainer"]


def test_nothing_is_granted_while_a_file_that_is_not_true_any_more_cannot_be_removed(
    own_network: None, books: Ledger, path: Path
) -> None:
    with disk(path.parent, "size=1m"):
        open_holders(path, books)
        remount(path.parent, "ro")
        with pytest.raises(LedgerError, match="neither be written nor removed"):
            books.grant(granted("rdma/vf", {VF: VF}))
        assert books.holds() == ()
        books.grant(granted("nvidia.com/gpu", {GPU: GPU}))
        remount(path.parent, "rw")
        books.grant(granted("rdma/vf", {VF: VF}))
        assert named(path) == ["?"]


def fill(folder: Path) -> Path:
    """Leave no page of a disk free."""
    filler = folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass
    return filler


def remount(folder: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(folder)], check=True)


def test_an_agent_that_ends_leaves_the_file_to_the_next_and_grants_nothing_more(books: Ledger, path: Path) -> None:
    kept = open_holders(path, books)
    books.grant(granted("rdma/vf", {VF: VF}))
    books.bind([VF], TRAINER)
    kept.close()
    left = named(path)
    assert left == ["default/trainer"]
    books.release([VF])
    kept.look()
    kept.complete()
    assert named(path) == left
    for give in (give_unit, prepare):
        with pytest.raises(LedgerError, match="the agent is ending"):
            give(books)
    assert (books.holds(), books.claims()) == ((), ())


def test_many_threads_leave_what_is_true(books: Ledger, path: Path) -> None:
    open_holders(path, books)
    wrong: list[str] = []

    def live(number: int) -> None:
        unit, pod = f"0000:{number:02x}:00.1", PodRef("default", f"p{number}")
        for _ in range(20):
            books.grant(granted("rdma/vf", {unit: unit}))
            if "unknown 1" not in path.read_text():
                wrong.append("a grant is not on file")
            books.bind([unit], pod)
            if f"\n{pod}\n" not in path.read_text():
                wrong.append("a pod is not on file")
            if number % 2:
                books.release([unit])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(live, range(8)))
    assert wrong == []
    assert named(path) == [f"default/p{number}" for number in range(0, 8, 2)]


# ---------------------------------------------------------------------- claims


def claim(kind: str = "vf", only_pod: str = "uid-t", pods: tuple[PodRef, ...] = (TRAINER,)) -> Claim:
    return Claim(ClaimRef("uid-claim", "default", "nics"), ClaimState.PREPARING, (of_claim(kind),), pods, only_pod)


def test_the_pod_of_a_claim_is_in_the_file_before_kubelet_hears_of_it_and_until_the_claim_is_gone(
    path: Path, books: Ledger
) -> None:
    open_holders(path, books)
    books.prepare_claim(claim())
    assert named(path) == ["default/trainer", "uid-t"]
    books.set_claim_state("uid-claim", ClaimState.PREPARED)
    books.set_claim_state("uid-claim", ClaimState.UNPREPARING)
    assert named(path) == ["default/trainer", "uid-t"]
    books.remove_claim("uid-claim")
    assert named(path) == []


def test_any_pod_of_its_namespace_may_have_a_claim_that_has_no_owner(path: Path, books: Ledger) -> None:
    kept = open_holders(path, books)
    books.prepare_claim(claim(only_pod="", pods=(TRAINER, WEB)))
    assert named(path) == ["default/", "default/trainer", "shop/web"]
    assert not kept.has_unknown  # kubelet need not be asked again and again whose a grant is
    books.remove_claim("uid-claim")
    assert named(path) == []


def test_claims_of_earlier_agents_and_a_new_configuration_count(path: Path, books: Ledger) -> None:
    books.prepare_claim(claim("hca"))
    config = Latest(Config(resources=RESOURCES, kubelet_dir=path.parent.parent))
    open_holders(path, books, config=config)
    assert named(path) == []
    config.set(replace(config.value, resources=(SHARES_OF_A_NETWORK,)))
    assert named(path) == ["default/trainer", "uid-t"]


def test_an_earlier_versions_file_of_pods_holds_on_in_the_same_boot(tmp_path: Path) -> None:
    versions.unpack(versions.WITH_PODS, tmp_path)
    file = pods_file.path_of(tmp_path / "cni.sock")
    assert file.read_text().splitlines()[3:] == ["default/trainer", "default/worker", "end"]
    with open_books(tmp_path, "boot-1") as books:
        kept = PodsFile(file, "kernel-boot-1", books, Latest(Config(kubelet_dir=tmp_path)))
        kept.look()
        assert file.read_text().splitlines()[3:] == ["default/trainer", "default/worker", "end"]
        (row,) = books.attachments()
        books.finish_detach(row)
        books.release(["0000:3b:00.2"])
        assert file.read_text().splitlines()[3:] == ["default/worker", "end"]
