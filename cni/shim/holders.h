/* Whether something may come into a pod's network, as far as that is told without the agent.
 *
 * The agent keeps it on file beside its socket, and brings the file up to date before it answers whatever changes it:
 * cni/pods_file.py says what is in it. So the file is right also while the agent hangs, starts or is away. One that is
 * missing, of another boot or not whole tells nothing. */
#ifndef NODEFABRIC_HOLDERS_H
#define NODEFABRIC_HOLDERS_H

#include <stdbool.h>

/* Whether it is certain that each pod which may have something is named in the file. */
bool holders_are_known(const char *socket_path);

/* Whether it is certain that the pod of the CNI_* environment has nothing. */
bool pod_has_nothing(const char *socket_path);

#endif
