"""Series about what adapters count: RDMA ports and VFs. The counters are read at each scrape, and only then.

They are written out here: the client library takes ten microseconds for a sample, and a node with a thousand VFs has
fifteen thousand of them. Series of one device share their labels, which are written once. Formats: Prometheus text
0.0.4 and OpenMetrics 1.0, where a counter's family has no suffix and its samples have `_total`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from agent.config import Config
from agent.errors import AgentError
from agent.model.counters import Counters, RdmaPortCounters, VfCounters
from agent.state import Latest

OPENMETRICS = "application/openmetrics-text"
END = b"# EOF\n"
_ESCAPED = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


WORD = 4
"""Bytes: what the data counters of a port count."""

_PORT = {
    "port_rcv_data": ("nodefabric_rdma_port_receive_bytes", "Bytes that came in through the port.", WORD),
    "port_xmit_data": ("nodefabric_rdma_port_transmit_bytes", "Bytes that went out through the port.", WORD),
    "port_rcv_packets": ("nodefabric_rdma_port_receive_packets", "Packets that came in through the port.", 1),
    "port_xmit_packets": ("nodefabric_rdma_port_transmit_packets", "Packets that went out through the port.", 1),
}
_VF = {
    "rx_bytes": ("nodefabric_vf_receive_bytes", "Bytes that the VF received."),
    "tx_bytes": ("nodefabric_vf_transmit_bytes", "Bytes that the VF sent."),
    "rx_packets": ("nodefabric_vf_receive_packets", "Packets that the VF received."),
    "tx_packets": ("nodefabric_vf_transmit_packets", "Packets that the VF sent."),
    "rx_broadcast": ("nodefabric_vf_receive_broadcast_packets", "Broadcast packets that the VF received."),
    "rx_multicast": ("nodefabric_vf_receive_multicast_packets", "Multicast packets that the VF received."),
    "rx_dropped": ("nodefabric_vf_receive_dropped_packets", "Packets to the VF that were dropped."),
    "tx_dropped": ("nodefabric_vf_transmit_dropped_packets", "Packets of the VF that were dropped."),
}

log = logging.getLogger(__name__)


class Adapters:
    """Reads the counters and turns them into series. What cannot be read is left out, and said once."""

    def __init__(self, read: Callable[[], Counters], config: Latest[Config]) -> None:
        """`read` is called on the scraping thread.

        The configuration says whether the names of sriov-network-metrics-exporter are wanted besides ours.
        """
        self._read = read
        self._config = config
        self._failing: str | None = None

    def families(self) -> tuple[Family, ...]:
        """Read and build all series."""
        try:
            found = self._read()
        except AgentError as error:
            if self._failing != error.reason:
                self._failing = error.reason
                log.warning("counters of adapters are left out: %s", error, extra={"reason": error.reason})
            return ()
        self._failing = None
        aliases = alias_families(found.vfs) if self._config.value.endpoints.exporter_names else ()
        return (*port_families(found.rdma), *vf_families(found.vfs), *aliases)


def port_families(ports: tuple[RdmaPortCounters, ...]) -> Iterator[Family]:
    """Build the series of RDMA ports."""
    named = [(port, labels(device=port.device, rdma_device=port.rdma_device, port=port.port)) for port in ports]
    yield Family(
        "nodefabric_rdma_port_active",
        "gauge",
        "1 if the port's state is ACTIVE, else 0.",
        [(where, int(port.active)) for port, where in named],
    )
    for kind, (name, text, unit) in _PORT.items():
        samples = [(where, port.standard[kind] * unit) for port, where in named if kind in port.standard]
        yield Family(name, "counter", text, samples)
    yield Family(
        "nodefabric_rdma_port_events",
        "counter",
        "Other counters of the port (sysfs counters).",
        [
            (f"{where},{labels(event=kind)}", value)
            for port, where in named
            for kind, value in port.standard.items()
            if kind not in _PORT
        ],
    )
    yield Family(
        "nodefabric_rdma_hw_events",
        "counter",
        "The driver's counters of the port (sysfs hw_counters).",
        [(f"{where},{labels(event=kind)}", value) for port, where in named for kind, value in port.hardware.items()],
    )


def vf_families(vfs: tuple[VfCounters, ...]) -> Iterator[Family]:
    """Build the series of VFs."""
    named = [(vf, labels(device=vf.device, pf=vf.pf, vf=vf.vf_index, numa_node=vf.numa_node)) for vf in vfs]
    for field, (name, text) in _VF.items():
        yield Family(name, "counter", text, _samples(named, field))


def alias_families(vfs: tuple[VfCounters, ...]) -> Iterator[Family]:
    """Build the same series under the names of sriov-network-metrics-exporter.

    It calls them counters without the suffix that OpenMetrics asks for; of no type, the names can stay.
    """
    named = [(vf, labels(pf=vf.pf, vf=vf.vf_index, pciAddr=vf.device, numa_node=vf.numa_node)) for vf in vfs]
    for field, (name, _) in _VF.items():
        yield Family(f"sriov_vf_{field}", "unknown", f"The same as {name}_total.", _samples(named, field))


def _samples(named: list[tuple[VfCounters, str]], field: str) -> list[tuple[str, int]]:
    return [(where, value) for vf, where in named if (value := getattr(vf.traffic, field)) is not None]


@dataclass(frozen=True, slots=True)
class Family:
    """Series of one name."""

    name: str
    """Without `_total`."""
    kind: str
    """counter, gauge or unknown"""
    text: str
    """One line of help."""
    samples: Sequence[tuple[str, int]]
    """Labels as `labels` writes them, and the value."""


def labels(**values: object) -> str:
    """Write labels out: device="0000:3b:00.2",vf="1"."""
    return ",".join(f'{name}="{str(value).translate(_ESCAPED)}"' for name, value in values.items())


def write(families: Iterable[Family], content_type: str) -> bytes:
    """Write families in the format of a content type, without the end mark of OpenMetrics."""
    open_metrics = content_type.startswith(OPENMETRICS)
    parts: list[str] = []
    for family in families:
        sample = f"{family.name}_total" if family.kind == "counter" else family.name
        name = family.name if open_metrics else sample
        kind = "untyped" if family.kind == "unknown" and not open_metrics else family.kind
        parts.append(f"# HELP {name} {family.text}\n# TYPE {name} {kind}\n")
        parts += [f"{sample}{{{labels}}} {value}\n" for labels, value in family.samples]
    return "".join(parts).encode()


def joined(content_type: str, text: bytes, families: Iterable[Family]) -> bytes:
    """Put families behind a text that the client library wrote."""
    end = END if content_type.startswith(OPENMETRICS) else b""
    return text.removesuffix(END) + write(families, content_type) + end
