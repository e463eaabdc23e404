"""Cells whose value is looked up at each read, for what a test changes as it goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from agent.state import Latest

T = TypeVar("T")


class Live(Latest[T]):
    """Holds what a function returns at the moment."""

    def __init__(self, read: Callable[[], T]) -> None:
        self._read = read
        super().__init__(read())

    @property
    def value(self) -> T:
        return self._read()

    @value.setter
    def value(self, value: T) -> None:
        """What the function returns counts alone."""
