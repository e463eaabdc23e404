from __future__ import annotations

from pathlib import Path

import pytest

from hack.sim.pods import (
    Container,
    ExtendedClaim,
    ExtendedRequest,
    ManifestInvalid,
    PodClaim,
    PodSpec,
    UsedClaim,
    read_folder,
    read_manifest,
)

POD = """
apiVersion: v1
kind: Pod
metadata:
  name: train-0
  annotations: {nodefabric.io/note: hello}
spec:
  restartPolicy: Never
  initContainers:
    - {name: init, image: busybox, resources: {limits: {rdma/vf: 1}}}
  containers:
    - name: main
      image: cuda
      resources: {limits: {cpu: 4, memory: 8Gi, hugepages-2Mi: 1Gi, rdma/vf: "2", nvidia.com/gpu: 1, rdma/none: 0}}
"""


def test_a_pod_is_read_from_ordinary_yaml() -> None:
    (pod,) = read_manifest(POD, "pod.yaml")
    assert pod == PodSpec(
        "default",
        "train-0",
        (("nodefabric.io/note", "hello"),),
        (Container("init", (("rdma/vf", 1),)),),
        (Container("main", (("rdma/vf", 2), ("nvidia.com/gpu", 1))),),
    )


def test_a_file_may_hold_several_pods() -> None:
    assert [p.name for p in read_manifest(f"{POD}---{POD.replace('train-0', 'train-1')}", "x")] == [
        "train-0",
        "train-1",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is not YAML"),
        ("kind: Deployment", "not a Pod"),
        ("[]", "not a Pod"),
        ("kind: Pod", "metadata is missing"),
        ("kind: Pod\nmetadata: {name: p}\nspec: {}", "spec.containers is empty"),
        ("kind: Pod\nmetadata: {}\nspec: {}", "name is missing"),
        (POD.replace("rdma/vf: 1", "rdma/vf: 1.5"), "limit rdma/vf: 1.5 is not a whole number"),
    ],
)
def test_a_bad_manifest_is_refused_by_name(text: str, problem: str) -> None:
    with pytest.raises(ManifestInvalid, match=problem) as failure:
        read_manifest(text, "pod.yaml")
    assert str(failure.value).startswith("pod.yaml: ")


def test_a_bad_file_does_not_hide_the_good_ones(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(POD)
    (tmp_path / "b.yaml").write_text("{")
    (tmp_path / "c.yaml").write_text(POD)
    (tmp_path / "notes.txt").write_text("{")
    pods, problems = read_folder(tmp_path)
    assert [p.key for p in pods] == ["default/train-0"]
    assert len(problems) == 2
    assert "in another file already" in problems[1]


CLAIMS = """
apiVersion: v1
kind: Pod
metadata: {name: p, uid: uid-of-p}
spec:
  resourceClaims:
    - {name: own, resourceClaimTemplateName: two-rails}
    - {name: shared, resourceClaimName: hca}
    - {name: none, resourceClaimTemplateName: nothing}
  containers:
    - {name: main, resources: {claims: [{name: own, request: nic-0}, {name: shared}], limits: {rdma/vf: 1, a/b: 2}}}
status:
  resourceClaimStatuses:
    - {name: own, resourceClaimName: p-own-x7k2p}
    - {name: none}
  extendedResourceClaimStatus:
    resourceClaimName: p-extended-resources-q8z5d
    requestMappings: [{containerName: main, resourceName: rdma/vf, requestName: container-0-request-0}]
"""


def test_claims_are_read_from_spec_and_status_as_kubelet_gets_them() -> None:
    (pod,) = read_manifest(CLAIMS, "pod.yaml")
    assert pod.uid == "uid-of-p"
    assert pod.claims == (
        PodClaim("own", "p-own-x7k2p", from_template=True),
        PodClaim("shared", "hca"),
        PodClaim("none", "", from_template=True),
    )
    (main,) = pod.containers
    assert main.claims == (UsedClaim("own", "nic-0"), UsedClaim("shared"))
    mapping = ExtendedRequest("main", "rdma/vf", "container-0-request-0")
    assert pod.extended == ExtendedClaim("p-extended-resources-q8z5d", (mapping,))
    assert pod.by_plugins(pod.containers)[0].limits == (("a/b", 2),)


def test_a_pod_whose_claim_is_not_made_yet_is_none_for_kubelet() -> None:
    with pytest.raises(ManifestInvalid, match="claim own: no ResourceClaim has been made for it yet"):
        read_manifest(CLAIMS.replace("- {name: own, resourceClaimName: p-own-x7k2p}", ""), "pod.yaml")
