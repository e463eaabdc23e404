#include "deadline.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <time.h>

enum { LONGEST_SECONDS = 3600 };

int64_t now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

void sleep_ms(int64_t duration)
{
    struct timespec left = {.tv_sec = (time_t)(duration / 1000), .tv_nsec = (long)(duration % 1000) * 1000000};
    while (nanosleep(&left, &left) != 0 && errno == EINTR)
        ;
}

bool wait_ready(int fd, short events, int64_t deadline)
{
    for (;;) {
        int64_t left = deadline - now_ms();
        if (left < 0)
            left = 0;
        struct pollfd wanted = {.fd = fd, .events = events};
        int ready = poll(&wanted, 1, left > INT_MAX ? INT_MAX : (int)left);
        if (ready > 0 || (ready < 0 && errno != EINTR))
            return true;
        if (ready == 0)
            return false;
    }
}

bool parse_seconds(const char *text, int64_t *milliseconds)
{
    int64_t whole = 0, part = 0, weight = 100;
    const char *at = text;
    for (; *at >= '0' && *at <= '9' && whole <= LONGEST_SECONDS; at++)
        whole = whole * 10 + (*at - '0');
    if (at == text)
        return false;
    if (*at == '.')
        for (at++; *at >= '0' && *at <= '9'; at++, weight /= 10)
            part += (*at - '0') * weight;
    *milliseconds = whole * 1000 + part;
    return *at == 0 && *milliseconds <= LONGEST_SECONDS * 1000;
}
