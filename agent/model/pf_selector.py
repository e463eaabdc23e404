"""How configurations name some VFs of a PF: `ens1f0`, `ens1f0#0-7,9` or `0000:3b:00.0#0-3`."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from agent.model import number_ranges

_WORD = re.compile(r"[^\s/]{1,64}")
HIGHEST_VF = 65535


@dataclass(frozen=True, slots=True)
class PfSelector:
    """A PF and, optionally, some of its VFs."""

    pf: str
    """Its interface or its PCI address."""
    vf_indices: frozenset[int] | None = None

    def takes(self, pf_names: Collection[str], vf_index: int | None) -> bool:
        """Tell whether a VF of a PF with these names is meant."""
        if self.pf.lower() not in (name.lower() for name in pf_names):
            return False
        return self.vf_indices is None or vf_index in self.vf_indices


def word(text: str) -> str:
    """Return a name of the kernel's as it is. Raises ValueError for what none can be."""
    if not _WORD.fullmatch(text) or text in (".", ".."):
        raise ValueError(text)
    return text


def parse_pf(text: str) -> PfSelector:
    """Read `NAME` or `NAME#0-7,9`. Raises ValueError for anything else."""
    name, sharp, ranges = text.partition("#")
    word(name)
    if not sharp:
        return PfSelector(name)
    return PfSelector(name, number_ranges.ids(number_ranges.parse(ranges, HIGHEST_VF)))
