"""What can go wrong with the machine, each kind with an exit status of its own."""

from __future__ import annotations


class RigError(Exception):
    """Something the caller has to put right: an option, a full disk, a mirror without that suite."""

    status = 1


class Impossible(RigError):
    """This computer cannot run the virtual machine at all, whatever the options are."""

    status = 123


class TimedOut(RigError):
    """The time that the caller allowed is over."""

    status = 124


class GuestFailed(RigError):
    """The guest ended, or did not start, without a status of the command. Trying again may help."""

    status = 125
