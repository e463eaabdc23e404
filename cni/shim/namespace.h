/* The pod's network namespace, as the runtime names it. */
#ifndef NODEFABRIC_NAMESPACE_H
#define NODEFABRIC_NAMESPACE_H

/* Opens the network namespace at `path`; the descriptor, unlike the path, cannot come to mean another one while a
 * request waits. Never blocks, whatever is there. Returns -1 and fills `why` if it is none. */
int open_namespace(const char *path, const char **why);

#endif
