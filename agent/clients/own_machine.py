"""HTTP to addresses of this machine."""

from __future__ import annotations

import urllib.request
from http.client import HTTPException, HTTPResponse
from typing import cast

from agent.errors import Unavailable


def get(url: str, seconds: float) -> HTTPResponse:
    """Ask an address of this machine, whatever proxy the environment names for others.

    The environment of a node's shell often names one, and no_proxy seldom this machine. Raises HTTPError for an
    answer that is an error, OSError if nobody answers, Unavailable if what answers does not speak HTTP.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        return cast(HTTPResponse, opener.open(url, timeout=seconds))
    except HTTPException as error:
        raise Unavailable(f"what answers at {url} does not speak HTTP") from error
