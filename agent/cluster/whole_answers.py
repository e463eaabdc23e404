"""Connections whose answers come whole within their time limit, however slowly they trickle.

http.client and urllib3 limit each read of a socket alone: a peer that sends a byte now and then is read for ever. Here
the socket's timeout when an answer begins is that of all of it: status line, headers and body. Loaded with the client.
"""

from __future__ import annotations

import http.client
import io
import socket
import time
from typing import Any

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool


class _Reads(io.RawIOBase):
    """What an answer is read from. Each read may take as long as is left."""

    def __init__(self, sock: socket.socket, raw: io.RawIOBase) -> None:
        seconds = sock.gettimeout()
        self._deadline = None if seconds is None else time.monotonic() + seconds
        self._sock = sock
        self._raw = raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        """Read what there is. Raises TimeoutError once the answer's time is over."""
        if self._deadline is not None:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("the answer was not complete in time")
            self._sock.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **more: Any) -> None:
        super().__init__(sock, *args, **more)
        self.fp = io.BufferedReader(_Reads(sock, self.fp.detach()))


class _Http(HTTPConnection):
    response_class = _Answer


class _Https(HTTPSConnection):
    response_class = _Answer


class _HttpPool(HTTPConnectionPool):
    ConnectionCls = _Http


class _HttpsPool(HTTPSConnectionPool):
    ConnectionCls = _Https


def limit(pools: urllib3.PoolManager) -> None:
    """Have all answers on connections of these pools come whole within their time limit."""
    pools.pool_classes_by_scheme = {"http": _HttpPool, "https": _HttpsPool}
