"""A pod of a manifest on a real runtime: what kubelet makes of its spec, as calls of the Container Runtime Interface.

As far as our DaemonSets go: host network, host paths, capabilities, users, seccomp, read-only root file systems,
init containers. A field that is not known here is refused, so that nothing of a manifest is silently left out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from proto.cri.v1 import api_pb2
from tests.containerd.cri import Cri
from tests.daemonset.manifests import FOLDER

Spec = Mapping[str, Any]
MASKED = ("acpi", "asound", "interrupts", "kcore", "keys", "latency_stats", "sched_debug", "scsi", "timer_list")
READ_ONLY = ("bus", "fs", "irq", "sys", "sysrq-trigger")
"""What kubelet has runtimes hide in /proc, or make read-only, unless procMount says otherwise."""
OF_POD = {
    *("automountServiceAccountToken", "containers", "dnsPolicy", "enableServiceLinks", "hostNetwork", "initContainers"),
    *("nodeSelector", "priorityClassName", "securityContext", "serviceAccountName", "terminationGracePeriodSeconds"),
    *("tolerations", "volumes"),
}
OF_CONTAINER = {
    *("args", "command", "env", "image", "imagePullPolicy", "livenessProbe", "name", "ports", "readinessProbe"),
    *("resources", "securityContext", "startupProbe", "volumeMounts"),
}
OF_CONTEXT = {
    *("allowPrivilegeEscalation", "capabilities", "privileged", "readOnlyRootFilesystem", "runAsNonRoot"),
    *("runAsUser", "seccompProfile"),
}
SECONDS = 60.0
SECCOMP = FOLDER / "seccomp.json"
"""The one profile that is in kubelet's folder for them."""


class ContainerFailed(Exception):
    """An init container ended with another status than 0; its log is told."""


class ManifestPod:
    """One pod that the runtime is told of step by step."""

    def __init__(self, cri: Cri, spec: Spec, folder: Path, cgroup: str, files: Mapping[str, Path]) -> None:
        """`files` are the folders that kubelet makes of volumes that are no host paths, by the volume's name."""
        _known(spec, OF_POD)
        self._cri, self._spec, self._folder, self._files = cri, spec, folder, files
        folder.mkdir(exist_ok=True)
        namespaces = api_pb2.NamespaceOption(
            network=api_pb2.NODE if spec["hostNetwork"] else api_pb2.POD, pid=api_pb2.CONTAINER
        )
        context = api_pb2.LinuxSandboxSecurityContext(
            namespace_options=namespaces, seccomp=_seccomp(spec["securityContext"])
        )
        self._namespaces = namespaces
        self._config = api_pb2.PodSandboxConfig(
            metadata=api_pb2.PodSandboxMetadata(name=folder.name, uid=f"uid-{folder.name}", namespace="nodefabric"),
            log_directory=str(folder),
            linux=api_pb2.LinuxPodSandboxConfig(cgroup_parent=cgroup, security_context=context),
        )
        self.sandbox = cri.run_sandbox(self._config)

    def run_init_containers(self) -> None:
        """Run them one after the other. Raises ContainerFailed."""
        for container in self._spec["initContainers"]:
            started = self.start(container)
            deadline = time.monotonic() + SECONDS
            while (status := self._cri.container_status(started)).state != api_pb2.CONTAINER_EXITED:
                assert time.monotonic() < deadline, f"{container['name']} does not end"
                time.sleep(0.05)
            if status.exit_code != 0:
                raise ContainerFailed(f"{container['name']}: {status.exit_code}: {self.log(container['name'])}")

    def start(self, container: Spec, *more_args: str, more_mounts: Mapping[str, Path] | None = None) -> str:
        """Create and start one of its containers; returns the runtime's ID."""
        config = self._container(container)
        config.args.extend(more_args)
        for path, source in (more_mounts or {}).items():
            config.mounts.append(api_pb2.Mount(container_path=path, host_path=str(source)))
        started = self._cri.create_container(self.sandbox, config, self._config)
        self._cri.start_container(started)
        return started

    def log(self, name: str) -> str:
        """Return what a container has written: each line after time, stream and a flag."""
        lines = (self._folder / f"{name}.log").read_text(errors="replace").splitlines()
        return "\n".join(line.split(" ", 3)[-1] for line in lines)

    def end(self) -> None:
        self._cri.stop_sandbox(self.sandbox)
        self._cri.remove_sandbox(self.sandbox)

    def _container(self, container: Spec) -> api_pb2.ContainerConfig:
        _known(container, OF_CONTAINER)
        security = {**self._spec["securityContext"], **container["securityContext"]}
        _known(security, OF_CONTEXT)
        capabilities = security["capabilities"]
        context = api_pb2.LinuxContainerSecurityContext(
            capabilities=api_pb2.Capability(
                add_capabilities=capabilities.get("add", ()), drop_capabilities=capabilities.get("drop", ())
            ),
            privileged=security.get("privileged", False),
            namespace_options=self._namespaces,
            run_as_user=api_pb2.Int64Value(value=security.get("runAsUser", 0)),
            readonly_rootfs=security.get("readOnlyRootFilesystem", False),
            # As kubelet has it: no flag is set for a container that may escalate.
            no_new_privs=not security.get("allowPrivilegeEscalation", True),
            masked_paths=[*(f"/proc/{name}" for name in MASKED), "/sys/firmware"],
            readonly_paths=[f"/proc/{name}" for name in READ_ONLY],
            seccomp=_seccomp(security),
        )
        return api_pb2.ContainerConfig(
            metadata=api_pb2.ContainerMetadata(name=container["name"]),
            image=api_pb2.ImageSpec(image=container["image"]),
            command=container.get("command", ()),
            args=container.get("args", ()),
            envs=[api_pb2.KeyValue(key=e["name"], value=_value(e).encode()) for e in container.get("env", ())],
            mounts=[self._mount(mount) for mount in container.get("volumeMounts", ())],
            log_path=f"{container['name']}.log",
            linux=api_pb2.LinuxContainerConfig(security_context=context),
        )

    def _mount(self, mount: Spec) -> api_pb2.Mount:
        _known(mount, {"name", "mountPath", "readOnly", "mountPropagation"})
        (volume,) = [v for v in self._spec["volumes"] if v["name"] == mount["name"]]
        if "hostPath" in volume:
            source = Path(volume["hostPath"]["path"])
            kind = volume["hostPath"]["type"]
            if kind == "DirectoryOrCreate":
                source.mkdir(mode=0o755, parents=True, exist_ok=True)
            assert source.is_dir() if kind.startswith("Directory") else source.is_file(), f"{source} is no {kind}"
        else:
            source = self._files[volume["name"]]
        propagation = {
            "None": api_pb2.PROPAGATION_PRIVATE,
            "HostToContainer": api_pb2.PROPAGATION_HOST_TO_CONTAINER,
        }[mount.get("mountPropagation", "None")]
        return api_pb2.Mount(
            container_path=mount["mountPath"],
            host_path=str(source),
            readonly=mount.get("readOnly", False),
            propagation=propagation,
        )


def _known(given: Spec, known: set[str]) -> None:
    if unknown := given.keys() - known:
        raise AssertionError(f"no kubelet's work is done here for {', '.join(sorted(unknown))}")


def _seccomp(context: Spec) -> api_pb2.SecurityProfile:
    wanted = context["seccompProfile"]
    if wanted == {"type": "RuntimeDefault"}:
        return api_pb2.SecurityProfile(profile_type=api_pb2.SecurityProfile.RuntimeDefault)
    assert wanted == {"type": "Localhost", "localhostProfile": SECCOMP.name}
    return api_pb2.SecurityProfile(profile_type=api_pb2.SecurityProfile.Localhost, localhost_ref=str(SECCOMP))


def _value(entry: Spec) -> str:
    if "value" in entry:
        return str(entry["value"])
    field = entry["valueFrom"]["fieldRef"]["fieldPath"]
    known = {"spec.nodeName": "sim-node", "metadata.namespace": "nodefabric", "metadata.name": "nodefabric-x"}
    return known[field]
