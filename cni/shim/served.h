/* Whether an agent was ready to serve a short while ago.
 *
 * kubelet calls the whole node not ready while STATUS fails, and the control plane then takes all its pods out of
 * their Services. An agent that is being updated is no reason for that: the relay keeps ADDs waiting for it. So what
 * the last STATUS found counts for a while, remembered as the time of an empty file beside the agent's socket. */
#ifndef NODEFABRIC_SERVED_H
#define NODEFABRIC_SERVED_H

#include <stdbool.h>
#include <sys/un.h>

enum { BESIDE_SIZE = sizeof((struct sockaddr_un *)0)->sun_path + 8 };

/* Names a file beside the agent's socket: its path, with this suffix. False if that is too long. */
bool name_beside(const char *socket_path, const char *suffix, char path[BESIDE_SIZE]);

/* Remembers that the agent on this socket is ready, or that it is not. */
void note_served(const char *socket_path, bool ready);

/* Whether it was ready within the last minute. */
bool served_lately(const char *socket_path);

#endif
