"""The SR-IOV virtual machine: fetch a kernel, boot it in QEMU, run one command in it.

`cli` is the face; below it `session` (prepare, then run), `machine` (QEMU's arguments), `guest` (the running
QEMU), `snapshot` (saved boots), `initramfs`, `kernel`, `release` and `apt` (where things come from). Standard
library only: it runs before anything of the project is installed.
"""
