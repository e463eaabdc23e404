"""What values change in what the chart makes: the values are in golden.yaml, what they change in golden.txt.

.venv/bin/python -m tests.daemonset.golden    writes golden.txt: read the difference before you commit it
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.daemonset.manifests import VERSION, Document, Kube

VALUES, CHANGES = (Path(__file__).with_suffix(end) for end in (".yaml", ".txt"))
ELSEWHERE = {"ClusterRoleBinding", "RoleBinding", "ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
"""What these say is evaluated by the tests of rights and admission."""
NAMES = ("mountPath", "name")


def cases() -> dict[str, Document]:
    """Return values by what they are for."""
    found: dict[str, Document] = yaml.safe_load(VALUES.read_text())
    return found


def expected() -> dict[str, str]:
    parts = re.split(r"^# (.+)\n", CHANGES.read_text(), flags=re.MULTILINE)
    return {name: text.strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)}


def changes(kube: Kube, values: Document) -> str:
    """Return what these values take away (-) and add (+)."""
    before, after = (
        {line for document in kube.template(each) for line in flat(document)}
        for each in ({"remove": True} if values.get("remove") else {}, values)
    )
    return "\n".join(
        [f"- {line}" for line in sorted(before - after)] + [f"+ {line}" for line in sorted(after - before)]
    )


def flat(document: Document) -> Iterator[str]:
    """Return an object's values, one a line."""
    name = f"{document['kind']} {document['metadata']['name']}"
    yield name
    if document["kind"] not in ELSEWHERE:
        own = {key: value for key, value in document.items() if key not in ("apiVersion", "kind", "metadata")}
        metadata = {key: document["metadata"][key] for key in ("annotations",) if key in document["metadata"]}
        for line in _lines({**metadata, **own}, f"{name}:"):
            yield line.replace(": spec template spec ", ": pod ").replace(f":{VERSION}", ":VERSION")


def _lines(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            # Both say no more than that the configuration is another.
            yield from _lines("…" if key in ("config.yaml", "checksum/config") else inner, f"{path} {key}")
    elif isinstance(value, list) and path.endswith("ontainers"):
        for item in value:
            yield from _lines({k: v for k, v in item.items() if k != "name"}, f"{path}[{item['name']}]")
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        told = [next((item[name] for name in NAMES if name in item), None) for item in value]
        assert None in told or len(told) == len(set(told)), f"the API server takes none twice: {path}"
        yield from (f"{path}[] {json.dumps(item, sort_keys=True)}" for item in value)
    else:
        yield f"{path} {json.dumps(value, ensure_ascii=False)}"


def main() -> int:
    kube = Kube.find()
    if kube is None:
        return 1
    CHANGES.write_text("\n".join(f"# {name}\n{changes(kube, values)}\n" for name, values in cases().items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
