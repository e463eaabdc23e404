"""Names of shares: the units of an adapter of which many pods have a part.

One is called `hca-<adapter>-<number>`, such as `hca-0c42a10300651234-7`: the adapter's node GUID, or its PCI address
where that says nothing (`deviceplugin.resources`).
"""

from __future__ import annotations

import re

_GUID = r"[0-9a-f]{16}"
_ADDRESS = r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7](?:-[0-9]{1,2})?"
_SHARE = re.compile(rf"hca-(?:{_GUID}|{_ADDRESS})-[0-9]{{1,5}}")


def is_share_id(text: str) -> bool:
    """Tell whether a text is the name of a share, whatever its resource."""
    return text.startswith("hca-") and _SHARE.fullmatch(text) is not None
