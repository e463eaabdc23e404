"""How a container gets its GPUs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from agent.edits.build import GpuFiles, GpuFilesOf, gpu_edits
from agent.edits.container_edits import ContainerEdits, DeviceNode
from agent.model.device import Gpu, MigDevice, Snapshot
from agent.model.health import HEALTHY
from agent.model.mounts import Mount
from agent.offer.offer import Unit
from deviceplugin.server import edits_message

SLICE = MigDevice("MIG-1", "1g.10gb", gpu_instance=7, compute_instance=1, memory_bytes=1, index=2)
SNAPSHOT = Snapshot(
    gpus=(
        Gpu("GPU-a", 0, 0, "0000:1b:00.0", "H100", 1),
        Gpu("GPU-b", 1, 5, "0000:3d:00.0", "H100", 1, mig_mode=True, mig_devices=(SLICE,)),
    )
)
FILES = GpuFiles(
    nodes=frozenset({"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia0", "/dev/nvidia5"}),
    mig_minors={"gpu5/gi7/access": 66, "gpu5/gi7/ci1/access": 68, "gpu0/gi7/access": 3},
)


def unit(device: str, unit_id: str = "") -> Unit:
    return Unit(unit_id or device, "nvidia.com/gpu", "gpu", device, HEALTHY, 0)


def grants(*devices: str, by: tuple[str, ...] = (), names: tuple[str, ...] = ()) -> ContainerEdits:
    files = replace(FILES, cdi_names=frozenset(names))
    return gpu_edits(by, [unit(device) for device in devices], SNAPSHOT, files)


def test_a_host_without_a_cdi_spec_gets_the_variable() -> None:
    assert grants("GPU-a", "GPU-b") == ContainerEdits(envs=(("NVIDIA_VISIBLE_DEVICES", "GPU-a,GPU-b"),))


def test_a_host_whose_spec_names_the_gpus_gets_its_names() -> None:
    assert grants("GPU-a", names=("GPU-a", "0", "all")).cdi_devices == ("nvidia.com/gpu=GPU-a",)
    assert grants("GPU-a", "GPU-b", names=("0", "1", "all")) == ContainerEdits(
        cdi_devices=("nvidia.com/gpu=0", "nvidia.com/gpu=1")
    )


def test_a_spec_that_does_not_name_all_gpus_is_not_used_unasked() -> None:
    assert grants("GPU-a", "GPU-b", names=("0", "all")).envs == (("NVIDIA_VISIBLE_DEVICES", "GPU-a,GPU-b"),)
    assert grants("GPU-a", names=("all",)).cdi_devices == ()


def test_cdi_that_was_asked_for_is_used_whatever_the_spec_names() -> None:
    assert grants("GPU-a", "GPU-new", by=("cdi",)).cdi_devices == ("nvidia.com/gpu=GPU-a", "nvidia.com/gpu=GPU-new")


def test_a_slice_is_named_by_uuid_or_by_the_numbers_of_gpu_and_slice() -> None:
    assert grants("MIG-1", names=("MIG-1", "1:2")).cdi_devices == ("nvidia.com/gpu=MIG-1",)
    assert grants("MIG-1", names=("1:2",)).cdi_devices == ("nvidia.com/gpu=1:2",)


def test_volume_mounts_name_the_gpus_by_mounts_that_a_pod_cannot_forge() -> None:
    found = grants("GPU-a", "GPU-b", by=("volume-mounts",))
    assert found.envs == (("NVIDIA_VISIBLE_DEVICES", "/var/run/nvidia-container-devices"),)
    assert found.mounts == (
        Mount("/dev/null", "/var/run/nvidia-container-devices/GPU-a"),
        Mount("/dev/null", "/var/run/nvidia-container-devices/GPU-b"),
    )
    [first, _] = edits_message(found).mounts
    assert (first.host_path, first.container_path, first.read_only) == (
        "/dev/null",
        "/var/run/nvidia-container-devices/GPU-a",
        True,
    )


def test_device_files_are_those_of_the_gpus_and_what_all_share() -> None:
    found = grants("GPU-a", "MIG-1", by=("envvar", "device-specs"))
    assert found.envs == (("NVIDIA_VISIBLE_DEVICES", "GPU-a,MIG-1"),)
    assert found.devices == tuple(
        DeviceNode(path)
        for path in (
            "/dev/nvidiactl",
            "/dev/nvidia-uvm",
            "/dev/nvidia0",
            "/dev/nvidia5",
            "/dev/nvidia-caps/nvidia-cap66",
            "/dev/nvidia-caps/nvidia-cap68",
        )
    )


def test_several_ways_at_once_are_all_gone() -> None:
    found = grants("GPU-a", by=("cdi", "envvar", "volume-mounts"))
    assert found.cdi_devices
    assert found.mounts
    assert dict(found.envs) == {"NVIDIA_VISIBLE_DEVICES": "/var/run/nvidia-container-devices"}


def test_two_replicas_of_one_gpu_are_one_device() -> None:
    units = [unit("GPU-a", "GPU-a::0"), unit("GPU-a", "GPU-a::7")]
    assert gpu_edits((), units, SNAPSHOT, FILES).envs == (("NVIDIA_VISIBLE_DEVICES", "GPU-a"),)
    assert len(gpu_edits(("cdi",), units, SNAPSHOT, FILES).cdi_devices) == 1


def test_a_gpu_that_is_gone_is_asked_for_by_its_uuid_and_has_no_files() -> None:
    found = grants("GPU-gone", by=("envvar", "device-specs"))
    assert (found.envs, found.devices) == ((("NVIDIA_VISIBLE_DEVICES", "GPU-gone"),), ())


def test_what_the_host_has_is_read_from_its_root(tmp_path: Path) -> None:
    assert GpuFilesOf(tmp_path).read() == GpuFiles()
    for path in ("dev/nvidia0", "dev/nvidiactl", "dev/null", "etc/cdi/nvidia.yaml"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "dev/nvidia-caps").mkdir()
    (tmp_path / "etc/cdi/nvidia.yaml").write_text("kind: nvidia.com/gpu\ndevices:\n- name: '0'\n")
    minors = tmp_path / "proc/driver/nvidia-caps/mig-minors"
    minors.parent.mkdir(parents=True)
    minors.write_text("config 1\nmonitor 2\ngpu0/gi0/access 3\ngpu0/gi0/ci0/access 4\n")
    found = GpuFilesOf(tmp_path).read()
    assert found.cdi_names == {"0"}
    assert found.nodes == {"/dev/nvidia0", "/dev/nvidiactl"}
    assert found.mig_minors["gpu0/gi0/ci0/access"] == 4
