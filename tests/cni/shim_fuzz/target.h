/* What a fuzz target is: one function that must come back, whatever bytes it is given. */
#ifndef NODEFABRIC_TARGET_H
#define NODEFABRIC_TARGET_H

#include <stddef.h>
#include <stdint.h>

struct target {
    const char *name;
    /* Tries the code on the bytes, and stops the process (see `must`) if its answer is wrong.
     * Returns one word on what it made of them. */
    const char *(*try)(const uint8_t *bytes, size_t length);
};

extern const struct target targets[];
extern const size_t target_count;

/* Stops the process unless `holds`. */
void must(int holds, const char *what);

#define MUST(condition) must((condition) != 0, #condition)

const char *try_answer(const uint8_t *bytes, size_t length);
const char *try_holders(const uint8_t *bytes, size_t length);
const char *try_link(const uint8_t *bytes, size_t length);
const char *try_netconf(const uint8_t *bytes, size_t length);
const char *try_report(const uint8_t *bytes, size_t length);
const char *try_request(const uint8_t *bytes, size_t length);
const char *try_spool(const uint8_t *bytes, size_t length);
const char *try_wait(const uint8_t *bytes, size_t length);

#endif
