"""Make a release of nodefabric, or build from source what a release has.

    hack/release VERSION [--dry-run] [--push REGISTRY]
    hack/release --build-from-source [--push REGISTRY]

A release of VERSION (such as 1.0.0 or 1.1.0-rc.1) writes the version where it is said, makes the changelog's section
"Not released yet" the version's, commits that, builds, and tags the commit vVERSION. After a failure, run the same
command again. Nothing leaves this machine without --push: push branch and tag yourself. With --build-from-source the
checkout is built as it is. A registry that has other contents under this version keeps them.

In build/release then: the image for all architectures and the chart, each as an OCI archive; the chart, the wheel and
the source distribution as files; a bill of materials (SPDX) for each architecture's image; SHA256SUMS. With --push they
are signed where cosign is installed (with the key that COSIGN_KEY names, if it is set), which enters the signature into
a public log. The same commit gives the same files where hack/build-image takes the same Debian packages.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from hack.oci import write_chart, write_index, write_tar

REPOSITORY = Path(__file__).resolve().parents[1]
OUTPUT = REPOSITORY / "build/release"
CHART = REPOSITORY / "daemonset/chart"
NAME = "nodefabric"
ARCHITECTURES = ("amd64", "arm64")
NUMBER = "(0|[1-9][0-9]*)"
VERSION = re.compile(rf"{NUMBER}\.{NUMBER}\.{NUMBER}(-(alpha|beta|rc)\.{NUMBER})?")
"""Those that mean the same to semver.org (chart, tags of images) and to PEP 440 (wheel)."""
UNRELEASED = "## Not released yet\n"
REGISTRY = re.compile(r"[a-z0-9.:\[\]-]+(/[a-z0-9._-]+)*")
REPOSITORY_KEY = re.compile(r"^(image:\n(?:  #.*\n)*  repository: )(\S+)$", re.MULTILINE)


class ReleaseError(Exception):
    """What keeps a release from being made, and what to do."""


def main() -> int:
    options = parse()
    try:
        if options.push:
            check_registry(options.push)
        if options.version is not None:
            check_version(options.version)
            check_checkout(options.version)
            changed = new_texts(options.version, datetime.now(UTC).date().isoformat())
            if changed and git("tag", "--list", f"v{options.version}"):
                raise ReleaseError(
                    f"the tag v{options.version} is on a commit of another version, which says so in "
                    f"{', '.join(changed)}: delete the tag, which this program makes (git tag --delete)"
                )
            if options.dry_run:
                show(changed, options.version, options.push)
                return 0
            commit(changed, options.version)
        build(options.push)
        if options.version is not None:
            tag(options.version)
        if options.push:
            push(options.push)
    except ReleaseError as error:
        print(f"hack/release: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        words = " ".join(str(word) for word in error.cmd)
        print(f"hack/release: failed with exit status {error.returncode}: {words}", file=sys.stderr)
        return 1
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="hack/release", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("version", nargs="?", metavar="VERSION", help="the new version")
    what.add_argument("--build-from-source", action="store_true", help="no new version: build the checkout as it is")
    parser.add_argument("--push", metavar="REGISTRY", help="push image and chart there, such as ghcr.io/OWNER")
    parser.add_argument("--dry-run", action="store_true", help="show what would change and be built, and end")
    options = parser.parse_args()
    if options.dry_run and options.build_from_source:
        parser.error("--dry-run is for a VERSION")
    return options


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True).stdout


def run(*command: str | Path, **environment: str) -> None:
    """Run a step in the repository; CI=true, so that nothing is left out of it silently."""
    settings = {**os.environ, "CI": "true", **environment}
    subprocess.run(command, cwd=REPOSITORY, check=True, env=settings)


def check_registry(registry: str) -> None:
    if shutil.which("skopeo") is None:
        raise ReleaseError("--push needs skopeo: apt-get install skopeo")
    if REGISTRY.fullmatch(registry) is None:
        raise ReleaseError(f"--push {registry!r}: write HOST[:PORT][/FOLDER] in lower case, such as ghcr.io/owner")


def check_version(version: str) -> None:
    if VERSION.fullmatch(version) is None:
        raise ReleaseError(f"{version!r} is no version: write MAJOR.MINOR.PATCH, such as 1.0.0 or 1.1.0-rc.1")


def check_checkout(version: str) -> None:
    if changes := git("status", "--porcelain").rstrip():
        raise ReleaseError(f"the checkout has changes: commit or remove them first\n{changes}")
    tagged = git("tag", "--list", f"v{version}").strip()
    if tagged and git("rev-parse", f"{tagged}^{{commit}}") != git("rev-parse", "HEAD"):
        raise ReleaseError(f"{version} is released already: the tag {tagged} is another commit's. Choose a new version")


def new_texts(version: str, date: str) -> dict[str, str]:
    """Return the files that a person writes and that change with a version, by path."""
    before = {name: (REPOSITORY / name).read_text() for name in ("pyproject.toml", "CHANGELOG.md", "README.md")}
    after = {
        "pyproject.toml": replace_once(r'^version = ".*"$', f'version = "{version}"', before["pyproject.toml"]),
        "CHANGELOG.md": released(before["CHANGELOG.md"], version, date),
        "README.md": replace_once(r"^(node \S+  nodefabric )\S+", rf"\g<1>{version}", before["README.md"]),
    }
    return {name: text for name, text in after.items() if text != before[name]}


def replace_once(pattern: str, new: str, text: str) -> str:
    text, count = re.subn(pattern, new, text, flags=re.MULTILINE)
    if count != 1:
        raise ReleaseError(f"{count} lines say the version as {pattern} instead of one: mend hack/releasing.py")
    return text


def released(changelog: str, version: str, date: str) -> str:
    """Give the section "Not released yet" the version and its date. A version that has a section keeps it."""
    if re.search(rf"^## {re.escape(version)}( |$)", changelog, re.MULTILINE):
        return changelog
    if UNRELEASED not in changelog:
        raise ReleaseError(f'CHANGELOG.md has no section "{UNRELEASED.strip()}": write what users have to know')
    return changelog.replace(UNRELEASED, f"## {version} ({date})\n", 1)


def show(changed: Mapping[str, str], version: str, registry: str | None) -> None:
    for name, text in changed.items():
        before = (REPOSITORY / name).read_text().splitlines(keepends=True)
        sys.stdout.writelines(difflib.unified_diff(before, text.splitlines(keepends=True), name, name, n=0))
    print(f"Then hack/make-manifests, a commit, the tag v{version}, and in {OUTPUT.relative_to(REPOSITORY)}:")
    for name in artefacts(version):
        print(f"  {name}")
    for source, target in destinations(version, registry).items():
        print(f"Pushed: {source} to {target}")


def commit(changed: Mapping[str, str], version: str) -> None:
    """Commit the new version. A failure leaves the checkout without changes, as it was."""
    try:
        for name, text in changed.items():
            (REPOSITORY / name).write_text(text)
        run(sys.executable, "hack/make-manifests")
        if git("status", "--porcelain"):
            git("commit", "--quiet", "--all", "--message", f"Release {version}")
    except BaseException:
        git("checkout", "--quiet", "HEAD", "--", ".")
        raise


def current_version() -> str:
    version: str = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    return version


def artefacts(version: str) -> list[str]:
    """Return what a build leaves, but checksums and signature."""
    python = re.sub(r"-(alpha|beta|rc)\.", lambda found: {"alpha": "a", "beta": "b", "rc": "rc"}[found[1]], version)
    return [
        f"{NAME}-{version}-image.tar",
        f"{NAME}-{version}-chart.tar",
        f"{NAME}-{version}.tgz",
        f"{NAME}-{python}-py3-none-any.whl",
        f"{NAME}-{python}.tar.gz",
        *(f"{NAME}-{version}-{architecture}.spdx.json" for architecture in ARCHITECTURES),
    ]


def destinations(version: str, registry: str | None) -> dict[str, str]:
    """Return where each OCI archive goes to; nowhere without a registry."""
    if not registry:
        return {}
    return {
        f"{NAME}-{version}-image.tar": f"{registry}/{NAME}:{version}",
        f"{NAME}-{version}-chart.tar": f"{registry}/charts/{NAME}:{version}",
    }


def build(registry: str | None) -> None:
    version, epoch = current_version(), int(git("log", "-1", "--format=%ct"))
    shutil.rmtree(OUTPUT, ignore_errors=True)
    OUTPUT.mkdir(parents=True)
    image, chart, packed = (OUTPUT / name for name in artefacts(version)[:3])
    build_images(version, image, epoch)
    pack_chart(packed, registry, epoch)
    write_chart(packed, chart, epoch)
    run(sys.executable, "-m", "hatchling", "build", "--directory", OUTPUT, SOURCE_DATE_EPOCH=str(epoch))
    missing = [name for name in artefacts(version) if not (OUTPUT / name).exists()]
    if missing:
        raise ReleaseError(f"the build did not make {', '.join(missing)}")
    write_checksums(OUTPUT)
    if registry:
        sign(OUTPUT)


def build_images(version: str, target: Path, epoch: int) -> None:
    run("hack/build-image", *ARCHITECTURES)
    folders = {architecture: REPOSITORY / "build/image" / architecture for architecture in ARCHITECTURES}
    write_index((folder / "image.tar" for folder in folders.values()), target, epoch)
    for architecture, folder in folders.items():
        bill = folder / "root/usr/share/nodefabric/sbom.spdx.json"
        shutil.copyfile(bill, OUTPUT / f"{NAME}-{version}-{architecture}.spdx.json")


def pack_chart(target: Path, registry: str | None, epoch: int) -> None:
    """Pack the chart, whose image is the one that is pushed beside it."""
    names = git("ls-files", "--cached", "--others", "--exclude-standard", "--", str(CHART)).split()
    files = {f"{NAME}/{Path(name).relative_to('daemonset/chart')}": (REPOSITORY / name).read_bytes() for name in names}
    if registry:
        values = REPOSITORY_KEY.sub(rf"\g<1>{registry}/{NAME}", files[f"{NAME}/values.yaml"].decode())
        files[f"{NAME}/values.yaml"] = values.encode()
    write_tar(target, files, epoch)


def write_checksums(folder: Path) -> None:
    """Write SHA256SUMS as `sha256sum --check` reads it."""
    lines = [f"{hashlib.sha256(p.read_bytes()).hexdigest()}  {p.name}\n" for p in sorted(folder.iterdir())]
    (folder / "SHA256SUMS").write_text("".join(lines))


def sign(folder: Path) -> None:
    if shutil.which("cosign") is None:
        print("SHA256SUMS is not signed: cosign is not installed")
        return
    key: Sequence[str] = ("--key", os.environ["COSIGN_KEY"]) if os.environ.get("COSIGN_KEY") else ()
    sums = folder / "SHA256SUMS"
    run("cosign", "sign-blob", "--yes", *key, "--bundle", f"{sums}.sigstore.json", sums)


def tag(version: str) -> None:
    """Tag the commit. Git signs the tag where tag.gpgSign is set."""
    if not git("tag", "--list", f"v{version}").strip():
        git("tag", "--annotate", f"v{version}", "--message", f"{NAME} {version}")
    print(f"To publish the commit and its tag: git push --atomic origin HEAD v{version}")


def push(registry: str) -> None:
    """Push with skopeo, which has its own log-in (`skopeo login`). A registry of this machine's need not have TLS.

    Replaces nothing: nodes that have an image of a version would go on with it.
    """
    tls = "false" if re.match(r"(localhost|127\.[0-9.]+|\[::1\])(:|/|$)", registry) else "true"
    pairs = destinations(current_version(), registry).items()
    for name, target in pairs:
        there = manifest(f"docker://{target}", tls)
        if there is not None and there != manifest(f"oci-archive:{OUTPUT / name}", tls):
            raise ReleaseError(
                f"{target} is there with other contents. Choose a new version: for a build from source write it into "
                "pyproject.toml, such as 1.0.1-rc.1, and run hack/make-manifests"
            )
    for name, target in pairs:
        options = ["--all", "--preserve-digests", f"--dest-tls-verify={tls}"]
        run("skopeo", "copy", "--quiet", *options, f"oci-archive:{OUTPUT / name}", f"docker://{target}")
        print(f"pushed {target}")


def manifest(name: str, tls: str) -> bytes | None:
    """Return the manifest of an image or chart; None if skopeo finds none there."""
    command = ["skopeo", "inspect", "--raw", f"--tls-verify={tls}", name]
    found = subprocess.run(command, check=False, capture_output=True)
    return found.stdout if found.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
