/* The little that the relay reads of a network configuration. */
#ifndef NODEFABRIC_NETCONF_H
#define NODEFABRIC_NETCONF_H

#include <stdbool.h>
#include <stddef.h>

/* Some bytes of a text. */
struct span {
    const unsigned char *at;
    size_t length;
};

bool equals(struct span span, const char *text);

/* Whether it is a name as container IDs and networks have it: a letter or digit, then up to 254 of these, '_', '.' and
 * '-'. No name holds what separates names on file. */
bool is_name(struct span span);

/* Whether a configuration is that of the plugin chained into a pod's network, and asks for nothing by itself: what comes
 * into the pod is then what kubelet gave it, and of a pod that has nothing `previous` is the whole answer. It is the
 * result of the plugin before, as it came, or empty. A NUL follows the text.
 * False for what is so, or may be read otherwise by somebody: the agent has the word then. It reads all keys, in
 * cni/netconf.py and agent/config/networks.py. */
bool is_chained(struct span text, struct span *previous);

#endif
