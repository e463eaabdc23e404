/* The conversation with the agent: one connection, one request, one answer. While the agent works on a request it sends
 * beats, if the mode of its socket says so: cni/protocol.py. */
#ifndef NODEFABRIC_LINK_H
#define NODEFABRIC_LINK_H

#include <stdint.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "frame.h"

enum {
    SILENCE_MS = 10000,      /* an agent that gives beats and was silent for so long hangs */
    ANY_SILENCE = INT32_MAX, /* an agent of an earlier version gives none */
};

enum outcome {
    ANSWERED,
    AGENT_AWAY, /* nobody listens, or it went away before it had the whole request: ask again */
    AGENT_DIED, /* it went away with the whole request, before the first byte of an answer: ask once more */
    AGENT_BUSY, /* it lives, but its queue of connections is full: ask again */
    NO_ANSWER,  /* asking again will not help; `why` says what happened */
};

struct exchange {
    enum outcome outcome;
    const char *why;     /* for all but ANSWERED */
    struct frame answer; /* for ANSWERED */
};

/* Asks the agent once. `netns` (-1: none) travels with the first byte. The answer must be complete by the deadline. */
struct exchange ask_agent(const struct sockaddr_un *agent, const struct frame *request, int netns, int64_t deadline);

/* The same over a connection that is made already; it must not block. The agent may be silent for `silence` ms. */
struct exchange ask_over(int link, const struct frame *request, int netns, int64_t deadline, int64_t silence);

#endif
