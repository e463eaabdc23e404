"""How kubelet learns of the driver: the Registration service on a socket in its folder of plugins.

kubelet looks into that folder, asks each new socket who serves it (GetInfo), and says what became of it (Notify…). It
does so again when it has started anew. A registration that it refused it tries again by itself, ever more seldom.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from agent.state import Latest
from deviceplugin.server import Context
from proto.pluginregistration.v1 import api_pb2, api_pb2_grpc

TYPE = "DRAPlugin"
VERSIONS = ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
"""Short names of the services. The first that kubelet knows serves claims; it skips those that it does not know."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Standing:
    """How a driver stands with kubelet."""

    registered: bool
    problem: str
    """Why it is not registered; empty when it is."""


class Registrar(api_pb2_grpc.RegistrationServicer):
    """Introduces the driver to kubelet, and notes what kubelet says."""

    def __init__(self, driver: str, endpoint: str, standing: Latest[Standing]) -> None:
        """The endpoint is the absolute path of the socket that serves the driver: for kubelet the same as for us."""
        self._driver = driver
        self._endpoint = endpoint
        self._standing = standing

    async def GetInfo(self, request: api_pb2.InfoRequest, context: Context) -> api_pb2.PluginInfo:
        return api_pb2.PluginInfo(
            type=TYPE, name=self._driver, endpoint=self._endpoint, supported_versions=list(VERSIONS)
        )

    async def NotifyRegistrationStatus(
        self, request: api_pb2.RegistrationStatus, context: Context
    ) -> api_pb2.RegistrationStatusResponse:
        if request.plugin_registered:
            log.info("registered with kubelet as DRA driver %s", self._driver)
            self._standing.set(Standing(True, ""))
        else:
            problem = f"kubelet did not register the DRA driver {self._driver}: {request.error or 'it told no reason'}"
            log.warning("%s", problem)
            self._standing.set(Standing(False, problem))
        return api_pb2.RegistrationStatusResponse()
