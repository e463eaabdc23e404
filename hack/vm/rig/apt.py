"""apt over one private list of Debian suites, so that the computer's own sources stay as they are."""

from __future__ import annotations

import re
from pathlib import Path

from rig import programs
from rig.errors import Impossible, RigError
from rig.progress import Deadline
from rig.release import DEBIAN_MIRROR

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_NON_INTERACTIVE = {"DEBIAN_FRONTEND": "noninteractive"}


def debian_mirror(deadline: Deadline) -> str:
    """Find the Debian mirror this computer uses already; the public one if it uses none."""
    targets = programs.run(["apt-get", "indextargets", "--format", "$(REPO_URI)|$(COMPONENT)"], deadline)
    for line in targets.split():
        uri, _, component = line.partition("|")
        if component == "main" and uri.rstrip("/").endswith("/debian"):
            return uri
    return DEBIAN_MIRROR


class Apt:
    """Packages of the given suites; with no suites, of the computer's own sources."""

    def __init__(self, folder: Path, suites: tuple[str, ...], deadline: Deadline) -> None:
        self.deadline = deadline
        self.suites = suites
        self.mirror = "the computer's own apt sources"
        self.options = ["-o", "DPkg::Lock::Timeout=120", "-o", "Acquire::Retries=3"]
        if not suites:
            self._update()
            return
        if not KEYRING.exists():
            raise Impossible(f"{KEYRING} is missing: install the package debian-archive-keyring")
        self.mirror = debian_mirror(deadline)
        for name in ("lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self._sources = folder / "sources.list"
        lines = "".join(f"deb [signed-by={KEYRING}] {self.mirror} {suite} main\n" for suite in suites)
        known = self._sources.exists() and self._sources.read_text() == lines
        self._sources.write_text(lines)
        self.options += ["-o", f"Dir::Etc::sourcelist={self._sources}", "-o", "Dir::Etc::sourceparts=/dev/null"]
        self.options += ["-o", f"Dir::State::lists={folder}/lists", "-o", f"Dir::Cache={folder}/cache"]
        # apt would fetch as the user _apt, who may not enter root's cache folder.
        self.options += ["-o", "APT::Sandbox::User=root"]
        if not known or not list((folder / "lists").glob("*_Packages*")):
            self.refresh()

    def refresh(self) -> None:
        """Fetch the suites' package lists anew."""
        try:
            self._update()
        except RigError:
            self._sources.unlink(missing_ok=True)
            raise

    def _update(self) -> None:
        try:
            programs.run(["apt-get", *self.options, "-q", "update", "--error-on=any"], self.deadline)
        except programs.ProgramFailed as error:
            if re.search(r"does not have a Release file|404 +Not Found", error.words):
                raise RigError(f"{self.mirror} has no suite {' or '.join(self.suites)}: name another") from error
            raise Impossible(f"apt cannot fetch package lists from {self.mirror}: {_reason(error.words)}") from error

    def field(self, package: str, name: str, suite: str) -> str:
        """Read one field of a package's record in a suite. Raises RigError if there is none."""
        record = programs.run(
            ["apt-cache", *self.options, "-t", suite, "--no-all-versions", "show", package], self.deadline
        )
        found = re.search(rf"^{name}: (.*)$", record, re.MULTILINE)
        if found is None:
            raise RigError(f"suite {suite} has no package {package} with a field {name}")
        return found[1]

    def download(self, packages: list[str], folder: Path) -> None:
        """Put the packages' files into the folder."""
        try:
            programs.run(["apt-get", *self.options, "-q", "download", *packages], self.deadline, cwd=folder)
        except programs.ProgramFailed as error:
            raise Impossible(f"apt cannot fetch {' '.join(packages)}: {_reason(error.words)}") from error

    def install(self, packages: list[str], suite: str | None = None) -> None:
        """Install packages on this computer, from the suite if one is named."""
        argv = ["apt-get", *self.options, "-q", "-y", "--no-install-recommends"]
        argv += ["-t", suite] if suite else []
        try:
            programs.run([*argv, "install", *packages], self.deadline, env=_NON_INTERACTIVE)
        except programs.ProgramFailed as error:
            raise Impossible(f"apt cannot install {' '.join(packages)}: {_reason(error.words)}") from error


def _reason(words: str) -> str:
    """Pick what apt gives as the reason: its E: lines, or its last words."""
    lines = words.strip().splitlines()
    return "; ".join([line for line in lines if line.startswith("E:")][:3] or lines[-2:]) or "it did not say why"
