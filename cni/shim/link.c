#include "link.h"

#include <errno.h>
#include <poll.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "deadline.h"

static unsigned char answer_bytes[FRAME_HEAD + ANSWER_LIMIT];

static struct exchange ended(enum outcome outcome, const char *why)
{
    return (struct exchange){.outcome = outcome, .why = why};
}

/* Waits for as long as the agent may be silent. */
static bool wait_for_sign(int link, short events, int64_t deadline, int64_t silence, const char **why)
{
    int64_t end = now_ms() + silence;
    if (wait_ready(link, events, end < deadline ? end : deadline))
        return true;
    if (end < deadline)
        *why = "it gives no sign of working on the request: does it hang?";
    return false;
}

static ssize_t send_some(int link, const unsigned char *bytes, size_t length, int netns)
{
    struct iovec part = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = length};
    union {
        struct cmsghdr aligned;
        unsigned char bytes[CMSG_SPACE(sizeof(int))];
    } control;
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (netns >= 0) {
        memset(&control, 0, sizeof control);
        message.msg_control = &control;
        message.msg_controllen = sizeof control;
        struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
        rights->cmsg_level = SOL_SOCKET;
        rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(rights), &netns, sizeof netns);
    }
    return sendmsg(link, &message, MSG_NOSIGNAL);
}

/* Sends the request, and counts what was sent. A peer that stops reading is no failure yet: it may have answered
 * already. */
static struct exchange send_request(int link, const struct frame *request, int netns, int64_t deadline, int64_t silence,
                                    size_t *count)
{
    const char *why = "it does not take the request in time";
    size_t sent = 0;
    while (sent < request->length) {
        ssize_t n = send_some(link, request->bytes + sent, request->length - sent, sent == 0 ? netns : -1);
        if (n > 0)
            *count = sent += (size_t)n;
        else if (n < 0 && (errno == EPIPE || errno == ECONNRESET))
            break;
        else if (n < 0 && errno != EAGAIN && errno != EINTR)
            return ended(NO_ANSWER, strerror(errno));
        else if (!wait_for_sign(link, POLLOUT, deadline, silence, &why))
            return ended(NO_ANSWER, why);
    }
    return ended(ANSWERED, NULL);
}

/* Beats come before the answer. Returns how much of it has come with them. */
static size_t drop_beats(size_t length)
{
    size_t beats = 0;
    while (beats < length && answer_bytes[beats] == BEAT)
        beats++;
    memmove(answer_bytes, answer_bytes + beats, length - beats);
    return length - beats;
}

/* The kernel tells an end with something unread (ECONNRESET), or of a connection that nobody took, from one with all of
 * the request taken: what that said may have been the agent's death. */
static struct exchange receive_answer(int link, bool sent, int64_t deadline, int64_t silence)
{
    struct frame received = {.bytes = answer_bytes, .length = 0};
    const char *why = "it does not answer in time";
    for (;;) {
        if (!wait_for_sign(link, POLLIN, deadline, silence, &why))
            return ended(NO_ANSWER, why);
        ssize_t n = recv(link, answer_bytes + received.length, sizeof answer_bytes - received.length, 0);
        if (n == 0 || (n < 0 && errno == ECONNRESET))
            return ended(received.length > 0 ? NO_ANSWER : n == 0 && sent ? AGENT_DIED : AGENT_AWAY,
                         received.length > 0 ? "it closed the connection inside an answer"
                                             : "it closed the connection without an answer");
        if (n < 0 && errno != EINTR && errno != EAGAIN)
            return ended(NO_ANSWER, strerror(errno));
        if (n < 0)
            continue;
        received.length = received.length == 0 ? drop_beats((size_t)n) : received.length + (size_t)n;
        if (received.length == 0)
            continue;
        switch (examine_answer(&received)) {
        case ANSWER_COMPLETE:
            return (struct exchange){.outcome = ANSWERED, .answer = received};
        case ANSWER_MALFORMED:
            return ended(NO_ANSWER, "its answer is malformed: are relay and agent of the same release?");
        case ANSWER_PARTIAL:
            break;
        }
    }
}

struct exchange ask_over(int link, const struct frame *request, int netns, int64_t deadline, int64_t silence)
{
    size_t sent = 0;
    struct exchange exchange = send_request(link, request, netns, deadline, silence, &sent);
    return exchange.outcome == ANSWERED ? receive_answer(link, sent == request->length, deadline, silence) : exchange;
}

static bool gives_beats(const struct sockaddr_un *agent)
{
    struct stat found;
    return stat(agent->sun_path, &found) == 0 && (found.st_mode & S_IXUSR) != 0;
}

struct exchange ask_agent(const struct sockaddr_un *agent, const struct frame *request, int netns, int64_t deadline)
{
    int link = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (link < 0)
        return ended(NO_ANSWER, strerror(errno));
    struct exchange exchange;
    int64_t silence = gives_beats(agent) ? SILENCE_MS : ANY_SILENCE;
    if (connect(link, (const struct sockaddr *)agent, sizeof *agent) != 0) {
        /* A unix socket whose backlog is full answers EAGAIN; it never answers EINPROGRESS. */
        if (errno == ENOENT || errno == ECONNREFUSED)
            exchange = ended(AGENT_AWAY, strerror(errno));
        else
            exchange = ended(errno == EAGAIN ? AGENT_BUSY : NO_ANSWER, strerror(errno));
    } else {
        exchange = ask_over(link, request, netns, deadline, silence);
    }
    close(link);
    return exchange;
}
