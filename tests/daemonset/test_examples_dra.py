"""The examples with claims: the chart makes their classes, the agent reads them, and the scheduler finds devices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from cel_expr_python import cel

from agent import config
from agent.config import Config
from deviceplugin.dra.allocated_claim import Opaque, Result
from deviceplugin.dra.attributes import Attributes
from deviceplugin.dra.devices import DraDevice
from deviceplugin.dra.parameters import settings_of
from hack.sim.cluster.allocator import Node, extended_claim
from hack.sim.cluster.claims_for_pairs import AMD, GPU_CLASS, NIC_DRIVER, PCI_BUS_ID, gpu_slice
from hack.sim.cluster.claims_for_pairs import classes as classes_of_gpus
from tests.daemonset.manifests import Document, Kube, documents
from tests.daemonset.test_examples import BY_PLUGIN, EXAMPLES, JOBS, pods
from tests.deviceplugin.dra.nodes import NODE, Offered, recorded_node

CONFIG = EXAMPLES / "config-dra.yaml"
BY_CLAIM = [path for path in JOBS if path not in BY_PLUGIN and path.name != "dra-unchanged.yaml"]
MOST_PREFERRED = 4
"""With more pairs of which one is preferred the scheduler may search for seconds."""


def templates(path: Path) -> dict[str, Document]:
    """Return the claims' specs by their templates' names."""
    found = (d for d in documents(path) if d["kind"] == "ResourceClaimTemplate")
    return {d["metadata"]["name"]: d["spec"]["spec"]["devices"] for d in found}


def asked(devices: Document) -> Iterator[tuple[str, Document]]:
    """List the names by which constraints and configurations may call requests, with what is asked for."""
    for request in devices["requests"]:
        if "exactly" in request:
            yield request["name"], request["exactly"]
        for either in request.get("firstAvailable", ()):
            yield f"{request['name']}/{either['name']}", either


@pytest.fixture(scope="module")
def of_chart(kube: Kube) -> dict[str, Document]:
    """The classes that the chart makes of the configuration, by name."""
    found = kube.template({"config": yaml.safe_load(CONFIG.read_text())})
    return {d["metadata"]["name"]: d for d in found if d["kind"] == "DeviceClass"}


@pytest.fixture(scope="module")
def classes(of_chart: dict[str, Document]) -> dict[str, Document]:
    return {name: each["spec"] for name, each in of_chart.items()}


@pytest.fixture(scope="module")
def parsed() -> Config:
    return config.parse(CONFIG.read_text(), CONFIG.name)


@pytest.mark.parametrize("path", BY_CLAIM, ids=lambda p: p.name)
def test_what_is_preferred_comes_before_what_it_is_to_be_near_to(path: Path) -> None:
    """The scheduler keeps what it took first, if there is any way to go on."""
    for devices in templates(path).values():
        order = [request["name"] for request in devices["requests"]]
        preferring = [request["name"] for request in devices["requests"] if "firstAvailable" in request]
        assert len(preferring) <= MOST_PREFERRED
        for constraint in devices.get("constraints", ()):
            bases = [name.partition("/")[0] for name in constraint["requests"]]
            for name in set(bases) & set(preferring):
                assert order.index(name) == min(map(order.index, bases))


@pytest.mark.parametrize("path", BY_CLAIM, ids=lambda p: p.name)
def test_pods_have_the_claims_that_their_containers_name(path: Path) -> None:
    found = templates(path)
    for document in documents(path):
        for spec in pods(document):
            claims = {each["name"]: each["resourceClaimTemplateName"] for each in spec["resourceClaims"]}
            assert set(claims.values()) <= found.keys()
            named = [each["name"] for c in spec["containers"] for each in c.get("resources", {}).get("claims", ())]
            assert set(named) == claims.keys()


@pytest.mark.parametrize("path", BY_CLAIM, ids=lambda p: p.name)
def test_parameters_are_such_as_the_agent_takes(path: Path, classes: dict[str, Document], parsed: Config) -> None:
    resources = {spec["extendedResourceName"]: name for name, spec in classes.items()}
    for devices in templates(path).values():
        results = [
            (Result(name, parsed.dra.driver, "node", f"device-{i}"), resource)
            for i, (name, what) in enumerate(asked(devices))
            for resource in parsed.claimable
            if resources[resource.name] == what["deviceClassName"]
        ]
        assert results
        of_classes = [
            Opaque(each["opaque"]["parameters"], (result.request,), from_class=True)
            for result, resource in results
            for each in classes[resources[resource.name]].get("config", ())
        ]
        of_claim = [Opaque(each["opaque"]["parameters"], tuple(each["requests"])) for each in devices.get("config", ())]
        settings = settings_of([*of_classes, *of_claim], results, parsed)
        for (_, resource), setting in zip(results, settings, strict=True):
            assert bool(setting.network) is (resource.name == "rdma/vf")
    assert {each["opaque"]["driver"] for d in templates(path).values() for each in d.get("config", ())} <= {
        parsed.dra.driver
    }


@pytest.fixture(scope="module")
def devices(parsed: Config) -> tuple[DraDevice, ...]:
    """What the scheduler is told of a node with the configuration."""
    return Offered(recorded_node("h100-8gpu"), parsed.resources, parsed.dra).devices


def plain(attributes: Attributes, driver: str) -> dict[str, dict[str, Any]]:
    """Return attributes as expressions see them: by domain, then by name."""
    found: dict[str, dict[str, Any]] = {}
    for name, typed in attributes.items():
        domain, _, short = name.rpartition("/")
        (found.setdefault(domain or driver, {})[short],) = typed.values()
    return found


def test_a_class_selects_the_devices_of_its_resource_and_no_others(
    classes: dict[str, Document], devices: tuple[DraDevice, ...], parsed: Config
) -> None:
    env = cel.NewEnv(variables={"device": cel.Type.DYN})
    for spec in classes.values():
        (selector,) = spec["selectors"]
        expression = env.compile(selector["cel"]["expression"])
        selected = set()
        for device in devices:
            seen = {"driver": parsed.dra.driver, "attributes": plain(device.attributes, parsed.dra.driver)}
            if expression.eval(data={"device": seen}).plain_value() is True:
                selected.add(device.resource_name)
        assert selected == {spec["extendedResourceName"]}
        other = {"driver": GPU_CLASS, "attributes": {GPU_CLASS: {"uuid": "GPU-1"}}}
        assert expression.eval(data={"device": other}).plain_value() is False


RECORDED = "h100-8gpu"
OF_AMD = "dra-rails-amd"
GPUS = 8


class Scheduler:
    """A node with eight GPUs and the configuration of the examples, and the classes of a cluster."""

    def __init__(self, of_chart: Mapping[str, Document], recorded: str = RECORDED) -> None:
        snapshot = recorded_node(recorded)
        parsed = config.parse(CONFIG.read_text(), CONFIG.name)
        offered = Offered(snapshot, parsed.resources, parsed.dra)
        self.devices: dict[str, DraDevice] = {device.name: device for device in offered.devices}
        self.gpus = {f"gpu-{gpu.index}": gpu.pci_address for gpu in snapshot.all_gpus}
        self.classes = {**of_chart, **{name: classes_of_gpus("")[name] for name in (GPU_CLASS, AMD)}}
        self._node = Node(NODE, [*offered.slices, gpu_slice(snapshot, NODE)], self.classes)
        self._pods = 0

    def place(self, example: str) -> Mapping[str, Sequence[Mapping[str, Any]]] | None:
        """Allocate what a pod of an example claims, by the base of the request; None if it does not fit."""
        ((_, asked),) = templates(EXAMPLES / f"{example}.yaml").items()
        return self.place_claim({"spec": {"devices": asked}})

    def place_claim(self, claim: Mapping[str, Any]) -> Mapping[str, Sequence[Mapping[str, Any]]] | None:
        self._pods += 1
        found = self._node.allocate({f"claim-{self._pods}": claim})
        if found is None:
            return None
        (results,) = found.values()
        by_request: dict[str, list[Mapping[str, Any]]] = {}
        for result in results:
            by_request.setdefault(str(result["request"]).partition("/")[0], []).append(result)
        return by_request

    def gpu(self, result: Mapping[str, Any]) -> Any:
        """Tell which GPU a result is, or stands next to."""
        if result["driver"] != NIC_DRIVER:
            return self.gpus[result["device"]]
        return self.devices[result["device"]].attributes[PCI_BUS_ID]["string"]


@pytest.fixture
def scheduler(of_chart: Mapping[str, Document]) -> Scheduler:
    return Scheduler(of_chart)


@pytest.mark.parametrize("path", BY_CLAIM, ids=lambda p: p.name)
def test_a_pod_of_each_example_is_placed(of_chart: Mapping[str, Document], path: Path) -> None:
    assert Scheduler(of_chart, "mi300x-8gpu" if path.stem == OF_AMD else RECORDED).place(path.stem)


@pytest.mark.parametrize(
    ("example", "recorded"),
    [("dra-rails", RECORDED), (OF_AMD, "mi300x-8gpu"), (OF_AMD, "mi250-8gpu")],
)
def test_each_rail_is_a_gpu_and_what_stands_next_to_it(
    of_chart: Mapping[str, Document], example: str, recorded: str
) -> None:
    scheduler = Scheduler(of_chart, recorded)
    for _ in range(GPUS // 2):
        found = scheduler.place(example)
        assert found is not None
        pairs = [[scheduler.gpu(one) for (one,) in (found[f"gpu-{n}"], found[f"nic-{n}"])] for n in range(2)]
        assert all(gpu == near for gpu, near in pairs)
        assert pairs[0] != pairs[1]
    assert scheduler.place(example) is None


def test_what_is_preferred_is_had_as_long_as_it_is_there(scheduler: Scheduler) -> None:
    for _ in range(GPUS):
        found = scheduler.place("dra-preferred")
        assert found is not None
        ((nic,), (gpu,)) = found["nic-0"], found["gpu-0"]
        assert nic["request"] == "nic-0/near"
        assert scheduler.gpu(nic) == scheduler.gpu(gpu)


def test_another_adapter_will_do_where_the_near_one_has_none_left(scheduler: Scheduler) -> None:
    first = {"requests": [{"name": "nic", "exactly": {"deviceClassName": "rdma-vf"}}]}
    for _ in range(8):  # takes the place of the first GPU whole
        assert scheduler.place_claim({"spec": {"devices": first}}) is not None
    requests = {str(found["nic-0"][0]["request"]) for found in map(scheduler.place, ["dra-preferred"] * GPUS) if found}
    assert requests == {"nic-0/near", "nic-0/any"}


def test_a_pod_takes_the_whole_node_and_leaves_no_gpu_to_a_second(scheduler: Scheduler) -> None:
    found = scheduler.place("pytorch-dra")
    assert found is not None
    for request in ("gpus", "nics"):
        assert sorted(map(scheduler.gpu, found[request])) == sorted(scheduler.gpus.values())
    assert scheduler.place("pytorch-dra") is None


def test_shares_are_taken_from_one_adapter(scheduler: Scheduler) -> None:
    found = scheduler.place("dra-shares")
    assert found is not None
    ((result,),) = found.values()
    assert result["consumedCapacity"] == {"nodefabric.io/shares": "2"}


def test_for_an_unchanged_pod_the_scheduler_makes_the_claim(scheduler: Scheduler) -> None:
    (pod,) = documents(EXAMPLES / "dra-unchanged.yaml")
    claim = extended_claim(pod, scheduler.classes)
    assert claim is not None
    found = scheduler.place_claim(claim)
    assert found is not None
    ((one, other),) = found.values()
    assert one["device"] != other["device"]
    assert {scheduler.devices[each["device"]].resource_name for each in (one, other)} == {"rdma/vf"}
