"""The PodResources service of the kubelet stand-in.

One entry per device ID, app containers only, no UID; each look frees the devices of ended pods. Source:
kubelet 1.36.2 as it was seen, and Kubernetes, pkg/kubelet/apis/podresources/server_v1.go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import grpc
import grpc.aio

from hack.sim.devices import DeviceManager
from hack.sim.dra.claims import ClaimInfo
from hack.sim.dra.manager import DraManager
from hack.sim.pods import PodSpec
from proto.podresources.v1 import api_pb2, api_pb2_grpc

Context = grpc.aio.ServicerContext[object, object]


@dataclass(frozen=True, slots=True)
class ActivePod:
    """A pod that still counts."""

    uid: str
    spec: PodSpec


class PodResourcesService(api_pb2_grpc.PodResourcesListerServicer):
    """Answers from the device manager's books."""

    def __init__(
        self,
        devices: DeviceManager,
        pods: Callable[[], Iterable[ActivePod]],
        has_get: bool = True,
        dra: DraManager | None = None,
    ) -> None:
        self.lists = 0
        """How often List was called."""
        self._devices = devices
        self._pods = pods
        self._has_get = has_get
        self._dra = dra

    async def List(
        self, request: api_pb2.ListPodResourcesRequest, context: Context
    ) -> api_pb2.ListPodResourcesResponse:
        self.lists += 1
        self._devices.free()
        return api_pb2.ListPodResourcesResponse(pod_resources=[self._resources(p) for p in self._pods()])

    async def Get(self, request: api_pb2.GetPodResourcesRequest, context: Context) -> api_pb2.GetPodResourcesResponse:
        if not self._has_get:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "unknown method Get for service v1.PodResourcesLister")
        wanted = f"{request.pod_namespace}/{request.pod_name}"
        found = next((p for p in self._pods() if p.spec.key == wanted), None)
        if found is None:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"pod {request.pod_name} in namespace {request.pod_namespace} not found"
            )
        return api_pb2.GetPodResourcesResponse(pod_resources=self._resources(found))

    async def GetAllocatableResources(
        self, request: api_pb2.AllocatableResourcesRequest, context: Context
    ) -> api_pb2.AllocatableResourcesResponse:
        return api_pb2.AllocatableResourcesResponse(
            devices=[
                self._device(name, unit_id)
                for name, known in sorted(self._devices.resources.items())
                for unit_id in sorted(known.healthy)
            ]
        )

    def _resources(self, pod: ActivePod) -> api_pb2.PodResources:
        return api_pb2.PodResources(
            name=pod.spec.name,
            namespace=pod.spec.namespace,
            containers=[
                api_pb2.ContainerResources(
                    name=container.name,
                    devices=[
                        self._device(held.resource_name, unit_id)
                        for held in self._devices.of_container(pod.uid, container.name)
                        for unit_id in held.ids
                    ],
                    dynamic_resources=[
                        _claim(info)
                        for info in (self._dra.infos(pod.spec, container) if self._dra is not None else ())
                        if any(info.drivers.values())
                    ],
                )
                for container in pod.spec.containers
            ],
        )

    def _device(self, resource_name: str, unit_id: str) -> api_pb2.ContainerDevices:
        known = self._devices.resources.get(resource_name)
        device = known.devices.get(unit_id) if known else None
        nodes = [node.ID for node in device.topology.nodes] if device is not None else []
        return api_pb2.ContainerDevices(
            resource_name=resource_name,
            device_ids=[unit_id],
            topology=api_pb2.TopologyInfo(nodes=[api_pb2.NUMANode(ID=n) for n in nodes]) if nodes else None,
        )


def _claim(info: ClaimInfo) -> api_pb2.DynamicResource:
    return api_pb2.DynamicResource(
        claim_name=info.name,
        claim_namespace=info.namespace,
        claim_resources=[
            api_pb2.ClaimResource(
                cdi_devices=[api_pb2.CDIDevice(name=name) for name in device.cdi_ids],
                driver_name=driver,
                pool_name=device.pool,
                device_name=device.name,
                share_id=device.share_id or None,
            )
            for driver, device in info.devices()
        ],
    )
