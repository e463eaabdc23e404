"""What is wrong with an object, as the API server words it.

Source: Kubernetes 1.36, staging/src/k8s.io/apimachinery/pkg/util/validation (and field).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
SUBDOMAIN = re.compile(rf"{LABEL.pattern}(\.{LABEL.pattern})*")
_NAME = re.compile(r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]")
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")

_LABEL_TEXT = (
    "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with "
    "an alphanumeric character"
)
_SUBDOMAIN_TEXT = (
    "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and "
    "end with an alphanumeric character"
)


class Problems:
    """A list that grows; each begins with its path."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def required(self, path: str, detail: str = "") -> None:
        self.found.append(f"{path}: Required value{': ' if detail else ''}{detail}")

    def invalid(self, path: str, value: Any, detail: str) -> None:
        self.found.append(f"{path}: Invalid value: {json.dumps(value)}: {detail}")

    def forbidden(self, path: str, detail: str) -> None:
        self.found.append(f"{path}: Forbidden: {detail}")

    def too_long(self, path: str, limit: int) -> None:
        self.found.append(f"{path}: Too long: may not be more than {limit} bytes")

    def duplicate(self, path: str, value: Any) -> None:
        self.found.append(f"{path}: Duplicate value: {json.dumps(value)}")

    def not_supported(self, path: str, value: str, known: Iterable[str]) -> None:
        words = ", ".join(json.dumps(word) for word in known)
        self.found.append(f"{path}: Unsupported value: {json.dumps(value)}: supported values: {words}")

    def size(self, path: str, items: Sequence[Any] | Mapping[str, Any], most: int) -> bool:
        """Tell whether a list is within its limit; what is longer is not looked into."""
        if len(items) > most:
            self.found.append(f"{path}: Too many: {len(items)}: must have at most {most} items")
        return len(items) <= most

    def unique(self, path: str, keys: Sequence[Any]) -> None:
        for number, key in enumerate(keys):
            if key in keys[:number]:
                self.duplicate(f"{path}[{number}]", key)

    def immutable(self, path: str, value: Any, old: Any) -> None:
        if value != old:
            self.invalid(path, value, "field is immutable")

    def label(self, path: str, value: str) -> None:
        """A DNS label."""
        if len(value) > 63:
            self.invalid(path, value, "must be no more than 63 characters")
        if not LABEL.fullmatch(value):
            self.invalid(path, value, _LABEL_TEXT)

    def subdomain(self, path: str, value: str, most: int = 253) -> None:
        if len(value) > most:
            self.invalid(path, value, f"must be no more than {most} characters")
        if not SUBDOMAIN.fullmatch(value):
            self.invalid(path, value, _SUBDOMAIN_TEXT)

    def driver(self, path: str, value: str) -> None:
        """A driver's name, as that of a CSI driver."""
        if not value:
            self.required(path)
            return
        if len(value) > 63:
            self.too_long(path, 63)
        if not SUBDOMAIN.fullmatch(value.lower()):
            self.invalid(path, value, _SUBDOMAIN_TEXT)

    def pool(self, path: str, value: str) -> None:
        if not value:
            self.required(path)
            return
        if len(value) > 253:
            self.too_long(path, 253)
        for part in value.split("/"):
            self.subdomain(path, part)

    def label_name(self, path: str, value: str) -> None:
        """The key of a label: a name of up to 63 characters, perhaps after a domain and a slash."""
        domain, slash, name = value.rpartition("/")
        if not name or len(name) > 63 or not _NAME.fullmatch(name) or (slash and not SUBDOMAIN.fullmatch(domain)):
            self.invalid(path, value, "name part must consist of alphanumeric characters, '-', '_' or '.'")

    def label_value(self, path: str, value: str) -> None:
        if value and (len(value) > 63 or not _NAME.fullmatch(value)):
            self.invalid(path, value, "a valid label must be an empty string or consist of alphanumeric characters")

    def json_object(self, path: str, value: Any, most: int) -> None:
        """A raw JSON object of so many bytes at most."""
        if value is None:
            self.required(path)
        elif len(json.dumps(value, separators=(",", ":")).encode()) > most:
            self.too_long(path, most)
        elif not isinstance(value, dict):
            self.invalid(path, "<value omitted>", "must be a valid JSON object")
