/* The frame that the relay and the agent exchange. cni/protocol.py says what it looks like. */
#ifndef NODEFABRIC_FRAME_H
#define NODEFABRIC_FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "netconf.h"
#include "report.h"

enum {
    FRAME_HEAD = 8,
    BEAT = 0,                /* a byte before an answer: the agent works on the request */
    REQUEST_LIMIT = 1 << 20, /* what may follow the head */
    ANSWER_LIMIT = 4 << 20,
    VALUE_LIMIT = 64 << 10, /* one environment variable */
    INPUT_KEPT = 64 << 10,  /* of a network configuration that waits on disk: cni/server.py reads no more of a DEL's */
};

/* One frame; `length` counts the head too. */
struct frame {
    const unsigned char *bytes;
    size_t length;
};

/* What to do about a network configuration that is too long, does not end or cannot be read. */
enum input_need {
    INPUT_NEEDED,   /* fail */
    INPUT_IF_SOUND, /* leave it away: what a DEL undoes is in the agent's books, and it must not get stuck */
};

/* Makes the request from the CNI_* environment and standard input, in memory of its own. It asks for beats, and an ADD
 * says on which processor it runs.
 * Waits for the input until the deadline. Fills `trouble` and returns false if they cannot be had. */
bool compose_request(struct frame *request, enum input_need need, int64_t deadline, struct trouble *trouble);

/* The network configuration of the request that was composed. A NUL follows it. */
struct span request_input(const struct frame *request);

/* Leaves the network configuration out of the request that was composed, if it is too long to be kept. */
void shorten_request(struct frame *request);

/* How far the bytes received so far are an answer. */
enum answer_state { ANSWER_PARTIAL, ANSWER_COMPLETE, ANSWER_MALFORMED };

enum answer_state examine_answer(const struct frame *received);

/* The parts of a complete answer. */
int answer_exit(const struct frame *answer);
const unsigned char *answer_body(const struct frame *answer);
size_t answer_body_length(const struct frame *answer);

#endif
