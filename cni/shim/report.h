/* What the runtime gets to read: the agent's answer, or a CNI error object of our own. */
#ifndef NODEFABRIC_REPORT_H
#define NODEFABRIC_REPORT_H

#include <stdbool.h>
#include <stddef.h>

/* Error codes of the CNI specification, named as in cni/protocol.py. */
enum {
    INVALID_ENVIRONMENT = 4,
    IO_FAILURE = 5,
    INVALID_NETWORK_CONFIG = 7,
    TRY_AGAIN_LATER = 11,
    PLUGIN_NOT_AVAILABLE = 50,
};

/* A failure in the words of a CNI error object. `thing` and `why` may be NULL. */
struct trouble {
    int code;
    const char *msg;
    const char *thing; /* the path, variable or value concerned: any bytes */
    const char *why;
};

/* Prints a CNI error object; details are "thing: why". Returns the exit status to end with. */
int report(const struct trouble *trouble);

/* Writes all bytes to standard output. False when nobody reads them any more. */
bool print_all(const void *bytes, size_t length);

#endif
