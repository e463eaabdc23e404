/* Bounded waiting, on the clock that no one can set. */
#ifndef NODEFABRIC_DEADLINE_H
#define NODEFABRIC_DEADLINE_H

#include <stdbool.h>
#include <stdint.h>

/* Milliseconds since boot. */
int64_t now_ms(void);

void sleep_ms(int64_t duration);

/* Waits until `fd` is ready for poll's `events` (or broken, which the next call on it will tell).
 * False when the deadline, a value of now_ms(), passes first. */
bool wait_ready(int fd, short events, int64_t deadline);

/* Reads "12" or "0.25" seconds, an hour at most, into milliseconds. False for any other text. */
bool parse_seconds(const char *text, int64_t *milliseconds);

#endif
