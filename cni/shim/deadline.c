#include "deadline.h"

#include <errno.h>
#include <limits.h>
#include <poll.h>
#include <time.h>

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
