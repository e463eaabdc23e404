"""Sockets for questions about links, kept from one question to the next."""

from __future__ import annotations

import threading

from agent.hardware.rtnetlink import LinkSocket

_MOST_IDLE = 4


class IdleSockets:
    """Sockets in the process's namespace that are kept between questions: to open one takes as long as to ask."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._idle: list[LinkSocket] = []
        self._closed = False

    def close(self) -> None:
        """Close those that wait, and those in use once they are given back."""
        with self._guard:
            self._closed = True
            idle, self._idle = self._idle, []
        for links in idle:
            links.close()

    def take(self) -> LinkSocket:
        """Lend a socket to one thread. Raises OSError."""
        with self._guard:
            links = self._idle.pop() if self._idle else None
        return links or LinkSocket()

    def give_back(self, links: LinkSocket, *, sound: bool) -> None:
        """Take a socket back. One that is not sound is not lent again: an answer may still be on its way."""
        with self._guard:
            kept = sound and not self._closed and len(self._idle) < _MOST_IDLE
            if kept:
                self._idle.append(links)
        if not kept:
            links.close()
