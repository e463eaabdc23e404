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

enum { REPORT_SIZE = 16384 };

/* Length of the UTF-8 sequence of more than one byte that starts here, 0 if the bytes are none. Looks at no byte behind
 * the first NUL. */
size_t utf8_length(const unsigned char *at);

/* Writes a CNI error object; details are "thing: why", clipped where they are too long. Returns its length. */
size_t compose_report(const struct trouble *trouble, char object[REPORT_SIZE]);

/* Prints a CNI error object. Returns the exit status to end with. */
int report(const struct trouble *trouble);

/* Writes all bytes to standard output. False when nobody reads them any more. SIGALRM ends a wait for a reader. */
bool print_all(const void *bytes, size_t length);

#endif
