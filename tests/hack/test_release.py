"""A release, made in a copy of the checkout and pushed to a registry on loopback.

The images are those that hack/build-image has made, which tests/daemonset/test_image.py looks into. A stand-in signs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from hack.releasing import ARCHITECTURES, ReleaseError, artefacts, check_version, released
from tests.daemonset.manifests import RELEASED, REPOSITORY, VERSION, Kube, container, parsed, pod
from tests.waiting import until

IMAGES = REPOSITORY / "build/image"
NEXT = "7.8.9"
REGISTRY_SETTINGS = "version: 0.1\nstorage: {{filesystem: {{rootdirectory: {folder}}}}}\nhttp: {{addr: '{address}'}}\n"
BUILD_IMAGE = f"#!/bin/sh\nmkdir -p build && ln -sfn {IMAGES} build/image\n"
COSIGN = '#!/bin/sh\nwhile [ $# -gt 1 ]; do [ "$1" != --bundle ] || echo signed >"$2"; shift; done\n'
IDENTITY = {f"GIT_{who}_{what}": f"{what}@example.com" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[str]:
    """A registry of its own. Yields its address."""
    folder = tmp_path / "registry"
    folder.mkdir()
    program = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nodefabric/registry/docker-registry"
    if not program.exists() or shutil.which("skopeo") is None:
        pytest.skip("pushes nothing without skopeo and docker-registry: hack/setup --system, hack/fetch-registry")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (folder / "settings.yaml").write_text(REGISTRY_SETTINGS.format(folder=folder, address=address))
    with (folder / "log").open("wb") as log:
        served = subprocess.Popen([program, "serve", folder / "settings.yaml"], stdout=log, stderr=log)
    until(lambda: b"listening on" in (folder / "log").read_bytes())
    yield address
    served.kill()
    served.wait()


needs_images = pytest.mark.skipif(
    not all((IMAGES / architecture / "image.tar").exists() for architecture in ARCHITECTURES),
    reason="needs the images: hack/build-image amd64 arm64",
)


class Checkout:
    """A copy of this checkout with a history of one commit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "tools").mkdir(parents=True)
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate"]
        names = subprocess.run(listed, cwd=REPOSITORY, stdout=subprocess.PIPE, check=True, text=True).stdout
        present = "\0".join(name for name in names.split("\0") if (REPOSITORY / name).is_file())
        copy = ["xargs", "-0", "cp", "--parents", f"--target-directory={folder}"]
        subprocess.run(copy, cwd=REPOSITORY, input=present, check=True, text=True)
        (folder / ".venv").symlink_to(REPOSITORY / ".venv")
        (folder / "hack/build-image").write_text(BUILD_IMAGE)
        changelog = folder / "CHANGELOG.md"
        kept = changelog.read_text().replace("## Not released yet\n", "## 0.0.1\n")
        changelog.write_text(f"## Not released yet\n\nNews.\n\n{kept}")
        (folder / "tools/cosign").write_text(COSIGN)
        (folder / "tools/cosign").chmod(0o755)
        self.git("init", "--quiet")
        self.commit()

    def git(self, *arguments: str) -> str:
        environment = {**os.environ, **IDENTITY}
        command = ["git", *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, check=True, text=True
        ).stdout.rstrip()

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "Change")

    def release(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, **IDENTITY, "PATH": f"{self.folder / 'tools'}:{os.environ['PATH']}"}
        command = [sys.executable, "-m", "hack.releasing", *arguments]
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, check=False, text=True)

    @property
    def output(self) -> Path:
        return self.folder / "build/release"

    def made(self) -> dict[str, str]:
        """Return what a build left, as checksums by name."""
        return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in self.output.iterdir()}


@needs_images
def test_a_release_is_tagged_signed_and_pushed_and_the_pushed_chart_installs_the_pushed_image(
    tmp_path: Path, registry: str, kube: Kube
) -> None:
    checkout = Checkout(tmp_path / "checkout")
    before = checkout.git("rev-parse", "HEAD")
    shown = checkout.release(NEXT, "--dry-run", "--push", registry)
    assert f"+## {NEXT} (" in shown.stdout
    assert f"{registry}/charts/nodefabric:{NEXT}" in shown.stdout
    assert (checkout.git("status", "--porcelain"), checkout.git("rev-parse", "HEAD")) == ("", before)

    done = checkout.release(NEXT, "--push", registry)
    assert done.returncode == 0, done.stderr
    assert checkout.git("log", "--format=%s", f"{before}..v{NEXT}") == f"Release {NEXT}"
    assert checkout.git("status", "--porcelain") == ""
    assert re.match(rf"## {NEXT} \(\d{{4}}-\d\d-\d\d\)\n\nNews", (checkout.folder / "CHANGELOG.md").read_text())
    assert f"image: {RELEASED}:{NEXT}\n" in (checkout.folder / "daemonset/base/daemonset.yaml").read_text()

    made = checkout.made()
    assert made.keys() == {*artefacts(NEXT), "SHA256SUMS", "SHA256SUMS.sigstore.json"}
    subprocess.run(["sha256sum", "--check", "--quiet", "--strict", "SHA256SUMS"], cwd=checkout.output, check=True)
    sums = (checkout.output / "SHA256SUMS").read_text().splitlines()
    assert {line.split()[1] for line in sums} == {*artefacts(NEXT)}

    image = json.loads(raw_manifest(f"docker://{registry}/nodefabric:{NEXT}"))
    assert [each["platform"] for each in image["manifests"]] == [
        {"architecture": architecture, "os": "linux"} for architecture in ARCHITECTURES
    ]
    for architecture, each in zip(ARCHITECTURES, image["manifests"], strict=True):
        built = raw_manifest(f"oci-archive:{IMAGES / architecture / 'image.tar'}")
        assert each["digest"] == f"sha256:{hashlib.sha256(built).hexdigest()}"
    chart = f"oci://{registry}/charts/nodefabric"
    home = str(checkout.folder / "build/helm")
    rendered = subprocess.run(
        [kube.folder / "helm", "template", "x", chart, "--version", NEXT, "--plain-http"],
        env={"HOME": home},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    assert container(pod(parsed(rendered)), "agent")["image"] == f"{registry}/nodefabric:{NEXT}"

    again = checkout.release(NEXT, "--push", registry)
    assert again.returncode == 0, again.stderr
    assert checkout.git("rev-parse", f"v{NEXT}^{{commit}}") == checkout.git("rev-parse", "HEAD")
    assert checkout.made() == made

    (checkout.folder / "daemonset/chart/templates/NOTES.txt").write_text("Mine\n")
    other = checkout.release("--build-from-source", "--push", registry)
    assert (other.returncode, "charts/nodefabric:7.8.9 is there with other contents" in other.stderr) == (1, True)


def raw_manifest(name: str) -> bytes:
    command = ["skopeo", "inspect", "--raw", "--tls-verify=false", name]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout


@needs_images
def test_from_source_a_checkout_is_built_as_it_is(tmp_path: Path) -> None:
    made = Checkout(tmp_path / "checkout")
    head = made.git("rev-parse", "HEAD")
    (made.folder / "daemonset/chart/templates/NOTES.txt").write_text("Mine\n")
    done = made.release("--build-from-source")
    assert done.returncode == 0, done.stderr
    assert made.made().keys() == {*artefacts(VERSION), "SHA256SUMS"}  # a signature would be entered into a public log
    wanted = ("nodefabric/templates/NOTES.txt", "nodefabric/values.yaml")
    unpacked = subprocess.check_output(["tar", "-xOf", made.output / artefacts(VERSION)[2], *wanted], text=True)
    assert "Mine\n" in unpacked
    assert f"repository: {RELEASED}\n" in unpacked
    assert (made.git("rev-parse", "HEAD"), made.git("tag")) == (head, "")


def test_a_release_is_refused_before_anything_changes(tmp_path: Path) -> None:
    made = Checkout(tmp_path / "checkout")

    def refusal(*arguments: str) -> str:
        done = made.release(*arguments)
        assert (done.returncode, done.stdout) == (1, "")
        return done.stderr

    made.git("tag", "v1.2.3")
    (made.folder / "CHANGELOG.md").write_text("# Changes\n")
    assert "the checkout has changes" in refusal("1.2.4")
    made.commit()
    assert "1.2.3 is released already" in refusal("1.2.3")
    assert 'no section "## Not released yet"' in refusal("1.2.4")
    (made.folder / "CHANGELOG.md").write_text("## Not released yet\n")
    made.commit()
    made.git("tag", "v1.2.5")
    assert "the tag v1.2.5 is on a commit of another version" in refusal("1.2.5")
    assert "write HOST[:PORT][/FOLDER]" in refusal("1.2.4", "--push", "https://ghcr.io/me")
    (made.folder / "hack/make-manifests").write_text("raise SystemExit(7)")
    made.commit()
    failed = made.release("1.2.4")
    assert (failed.returncode, "failed with exit status 7" in failed.stderr) == (1, True)
    assert made.git("status", "--porcelain") == ""


@pytest.mark.parametrize("version", ["1.0.0", "0.10.2", "1.0.0-rc.1"])
def test_a_version_is_one_of_semver_and_of_python(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["1.0", "v1.0.0", "1.0.0.1", "01.0.0", "1.0.0-x", "1.0.0+a", "1.0.0\n", ""])
def test_what_is_no_version_is_refused(version: str) -> None:
    with pytest.raises(ReleaseError, match=re.escape("such as 1.0.0")):
        check_version(version)


def test_the_changelog_of_a_version_is_named_once() -> None:
    once = released("# Changes\n\n## Not released yet\n\n- A\n\n## 0.1.0\n", "1.0.0", "2026-12-01")
    assert once == "# Changes\n\n## 1.0.0 (2026-12-01)\n\n- A\n\n## 0.1.0\n"
    assert released(once, "1.0.0", "2026-12-02") == once


def test_documents_name_the_place_of_releases_and_no_version() -> None:
    home = RELEASED.rpartition("/")[0]
    for path in (REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")):
        text = path.read_text()
        assert {*re.findall(r"ghcr\.io/[\w./-]+", text)} <= {RELEASED, f"{home}/charts/nodefabric"}, path
        assert not re.search(r"nodefabric:\d", text), path


@pytest.mark.parametrize("path", sorted((REPOSITORY / ".github/workflows").iterdir()), ids=lambda p: p.stem)
def test_a_hosted_workflow_takes_nothing_that_can_change_and_may_do_little(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    (job,) = workflow["jobs"].values()
    for step in job["steps"]:
        assert "uses" not in step or re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step["uses"])
        # What a tag or branch is called must not become a part of a script.
        assert "${{" not in step.get("run", "")
    assert workflow["permissions"] in ({}, {"contents": "read"})
