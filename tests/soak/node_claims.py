"""Claims on a node, as the scheduler, the API server and kubelet have them, and what kubelet was answered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agent.model.allocation import ClaimRef, PodRef
from tests.deviceplugin.dra.claim_documents import claim, network
from tests.soak.agent import Agent
from tests.soak.calls import Pod
from tests.soak.configured import DRIVER, POOL
from tests.soak.kubelet import API_AWAY, Cluster
from tests.soak.world import History

PLACE = "slots-claimed-late-vf-numa-0"
"""What of a ResourceSlice stands for all VFs that are bound late."""
TRIES = 40


@dataclass
class NodeClaims:
    """The claims of one node."""

    folder: Path
    history: Callable[[], History]
    prepared: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Those that kubelet was told to be prepared, and has not had unprepared → CDI names."""
    ended: set[str] = field(default_factory=set)
    """Those that kubelet was told to be unprepared."""
    damaged: bool = False
    """Whether books or specs were taken away, and no agent has started since."""
    untold: set[str] = field(default_factory=set)
    """Those whose files were taken away, and which kubelet has not had prepared since."""
    _made: int = 0

    @property
    def uids(self) -> Sequence[str]:
        """List all claims that the API server has."""
        return tuple(Cluster.read(self.folder).claims)

    @property
    def promised(self) -> Mapping[str, tuple[str, ...]]:
        """List what holds of what was answered: as long as the API server has a claim, its pod may use it."""
        reserved = Cluster.read(self.folder).claims
        return {uid: names for uid, names in self.prepared.items() if uid in reserved}

    def allocate(self, pod: Pod, devices: Iterable[str], late: int = 0) -> str:
        """Give a pod some VFs, and so many that are chosen on the node, by a claim that no other pod may use."""
        self._made += 1
        uid = f"{self._made:08}-0000-4000-8000-000000000000"
        results: list[dict[str, Any]] = [
            {"request": f"early-{n}", "device": _name(device)} for n, device in enumerate(devices)
        ]
        for number in range(late):
            share = f"{self._made:08}-0000-4000-8000-{number:012}"
            consumed = {"consumedCapacity": {f"{DRIVER}/units": "1"}, "shareID": share}
            results.append({"request": f"late-{number}", "device": PLACE, **consumed})
        owner = PodRef("default", pod.name, pod.uid)
        document = claim(
            *({"driver": DRIVER, "pool": POOL, **result} for result in results),
            config=[network("FromClass", network="claims")],
            ref=ClaimRef(uid, "default", f"claim-{self._made}"),
            pods=[owner],
            owner=owner,
        )
        cluster = Cluster.read(self.folder)
        mine = [*cluster.by_claim.get(pod.name, ()), uid]
        replace(cluster, claims={**cluster.claims, uid: document}, by_claim={**cluster.by_claim, pod.name: mine}).write(
            self.folder
        )
        names = ", ".join(result["device"] for result in results)
        self._note(f"claim {uid[:8]} of {pod.container_id} gets {names}", uid)
        return uid

    def prepare(self, agent: Agent, uid: str) -> bool | None:
        """Call NodePrepareResources as kubelet does, and hold the node to its answer. None if the agent dies of it."""
        self.ended.discard(uid)
        answer = agent.order("prepare", **self._ref(uid))
        if isinstance(answer, list):
            self.prepared[uid] = tuple(name.partition("=")[2] for name in answer)
            self.untold.discard(uid)
        return self._noted("Prepare", uid, answer)

    def unprepare(self, agent: Agent, uid: str) -> bool | None:
        """Call NodeUnprepareResources. From now on nobody holds the node to what Prepare promised."""
        self.prepared.pop(uid, None)
        answer = agent.order("unprepare", **self._ref(uid))
        if isinstance(answer, list):
            self.ended.add(uid)
        return self._noted("Unprepare", uid, answer)

    def delete(self, uid: str) -> None:
        """Have the API server know it no more, as after a forced deletion, and the scheduler give its devices away."""
        cluster = Cluster.read(self.folder)
        replace(cluster, claims={k: v for k, v in cluster.claims.items() if k != uid}).write(self.folder)
        self._note(f"claim {uid[:8]} is deleted", uid)

    def unlist(self, pod: Pod) -> None:
        """Have kubelet know a pod no more."""
        cluster = Cluster.read(self.folder)
        replace(cluster, by_claim={k: v for k, v in cluster.by_claim.items() if k != pod.name}).write(self.folder)

    def unlist_all(self) -> None:
        """Have kubelet know no pod."""
        replace(Cluster.read(self.folder), by_claim={}).write(self.folder)

    @property
    def api_is_away(self) -> bool:
        """Whether the API server answers nobody."""
        return (self.folder / API_AWAY).exists()

    def have_api_away(self, away: bool) -> None:
        """Have the API server answer nobody, or everybody."""
        path = self.folder / API_AWAY
        path.touch() if away else path.unlink(missing_ok=True)
        self._note(f"the API server {'is away' if away else 'answers'}")

    def of(self, pod: Pod) -> Sequence[str]:
        """List a pod's claims."""
        claims = Cluster.read(self.folder).claims.items()
        return [uid for uid, claim in claims if claim["status"]["reservedFor"][0]["uid"] == pod.uid]

    def results_of(self, pod: Pod) -> int:
        """Count the devices that a pod is promised."""
        claims = Cluster.read(self.folder).claims
        return sum(_results(claims[uid]) for uid in self.of(pod) if uid in self.prepared)

    def forget(self) -> None:
        """Begin anew."""
        self.prepared.clear()
        self.ended.clear()
        self.untold.clear()
        self.damaged = False
        (self.folder / API_AWAY).unlink(missing_ok=True)

    def _ref(self, uid: str) -> dict[str, str]:
        claim = Cluster.read(self.folder).claims.get(uid)
        name = claim["metadata"]["name"] if claim is not None else f"claim-{int(uid[:8])}"
        return {"uid": uid, "namespace": "default", "name": name}

    def _noted(self, call: str, uid: str, answer: Any) -> bool | None:
        said = "is not answered" if answer is None else "succeeds"
        said = f"fails: {answer['error']}" if isinstance(answer, dict) else said
        self._note(f"{call} of claim {uid[:8]} {said}", uid)
        return None if answer is None else isinstance(answer, list)

    def _note(self, text: str, *concerned: str) -> None:
        self.history().note(text, *concerned)


def _results(claim: Mapping[str, Any]) -> int:
    return len(claim["status"]["allocation"]["devices"]["results"])


def _name(device: str) -> str:
    return f"vf-{device.replace(':', '-').replace('.', '-')}"
