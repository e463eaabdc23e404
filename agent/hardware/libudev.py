"""libudev by its soname, for pyudev.

pyudev asks `ctypes.util.find_library`, which starts ldconfig or gcc. The agent's image has no such programs, and on a
host one would be forked beside gRPC.
"""

from __future__ import annotations

import ctypes

from pyudev import Context
from pyudev._ctypeslib.libudev import ERROR_CHECKERS, SIGNATURES

SONAME = "libudev.so.1"


class UdevContext(Context):  # type: ignore[misc]  # pyudev has no types
    """`pyudev.Context`, with a library that is found without the help of programs. Raises OSError without one."""

    def __init__(self) -> None:
        self._libudev = ctypes.CDLL(SONAME, use_errno=True)
        for name, (arguments, result) in SIGNATURES.items():
            # As pyudev._ctypeslib.utils.load_ctypes_library does it.
            function = getattr(self._libudev, name, None)
            if function is not None:
                function.argtypes, function.restype = arguments, result
                if (checker := ERROR_CHECKERS.get(name)) is not None:
                    function.errcheck = checker
        self._as_parameter_ = self._libudev.udev_new()
