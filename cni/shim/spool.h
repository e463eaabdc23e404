/* The spool: DELs that no agent took, kept on disk until it does. */
#ifndef NODEFABRIC_SPOOL_H
#define NODEFABRIC_SPOOL_H

#include "frame.h"

/* Puts a request into `folder` (made if missing) so that it outlives a power cut once this returns true. The same
 * request is kept once, and no more files than an agent can have left behind that is gone for good.
 * A reader sees whole files named *.del only, and their names sort by time. Fills `trouble` when it returns false. */
bool spool_request(const char *folder, const struct frame *request, struct trouble *trouble);

#endif
