"""The IPAM plugin of the small node: host-local, which fails or hangs when it is told to."""

HOST_LOCAL = "/usr/lib/cni/host-local"
JOURNALLED = f"""\
#!/bin/sh
# The real host-local, with each call noted. A file `ipam-fails` or `ipam-hangs` makes it do so.
cd "$(dirname "$0")/.." || exit 1
echo "$CNI_COMMAND $CNI_CONTAINERID $CNI_IFNAME" >> ipam-calls
if [ -e ipam-hangs ]; then exec sleep 60; fi
if [ -e "ipam-fails-$CNI_COMMAND" ]; then
    echo '{{"cniVersion": "1.0.0", "code": 999, "msg": "told to fail"}}'
    exit 1
fi
exec {HOST_LOCAL}
"""
