#include "frame.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "deadline.h"

static const char magic[4] = {'N', 'F', 'C', '1'};

/* The variables of the CNI specification. Nothing else of the runtime's environment leaves this process. */
static const char *const variables[] = {
    "CNI_COMMAND", "CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS", "CNI_PATH",
};

/* An agent of an earlier version does not know it, and gives none. */
static const char asks_for_beats[] = "NODEFABRIC_BEATS=1";

/* One more byte shows that there is more; where there is not, a NUL is left behind the request. */
static unsigned char request_bytes[FRAME_HEAD + REQUEST_LIMIT + 1];
static size_t input_at; /* where the network configuration begins */

static bool fail(struct trouble *trouble, int code, const char *msg, const char *thing, const char *why)
{
    *trouble = (struct trouble){.code = code, .msg = msg, .thing = thing, .why = why};
    return false;
}

static void put(size_t *at, const char *bytes, size_t length)
{
    memcpy(request_bytes + *at, bytes, length);
    *at += length;
}

static bool put_environment(size_t *at, struct trouble *trouble)
{
    for (size_t i = 0; i < sizeof variables / sizeof variables[0]; i++) {
        const char *value = getenv(variables[i]);
        if (value == NULL)
            continue;
        size_t length = strnlen(value, VALUE_LIMIT + 1);
        if (length > VALUE_LIMIT)
            return fail(trouble, INVALID_ENVIRONMENT, "an environment variable is too long", variables[i],
                        "more than 64 KiB");
        put(at, variables[i], strlen(variables[i]));
        put(at, "=", 1);
        put(at, value, length + 1);
    }
    put(at, asks_for_beats, sizeof asks_for_beats);
    put(at, "", 1);
    return true;
}

static bool put_input(size_t *at, int64_t deadline, struct trouble *trouble)
{
    for (;;) {
        if (*at == sizeof request_bytes)
            return fail(trouble, INVALID_NETWORK_CONFIG, "the network configuration is too large", "standard input",
                        "with the environment more than 1 MiB; does prevResult or a list of attachments grow?");
        if (!wait_ready(STDIN_FILENO, POLLIN, deadline))
            return fail(trouble, IO_FAILURE, "the network configuration does not end", "standard input",
                        "still open, though the time for it is over");
        ssize_t got = read(STDIN_FILENO, request_bytes + *at, sizeof request_bytes - *at);
        if (got == 0)
            return true;
        if (got > 0)
            *at += (size_t)got;
        else if (errno != EINTR && errno != EAGAIN)
            return fail(trouble, IO_FAILURE, "the network configuration cannot be read", "standard input",
                        strerror(errno));
    }
}

static void end_request(struct frame *request, size_t at)
{
    size_t body = at - FRAME_HEAD;
    for (size_t i = 0; i < 4; i++)
        request_bytes[4 + i] = (unsigned char)(body >> (24 - 8 * i));
    *request = (struct frame){.bytes = request_bytes, .length = at};
}

bool compose_request(struct frame *request, enum input_need need, int64_t deadline, struct trouble *trouble)
{
    size_t at = FRAME_HEAD;
    if (!put_environment(&at, trouble))
        return false;
    input_at = at;
    if (!put_input(&at, deadline, trouble)) {
        if (need == INPUT_NEEDED)
            return false;
        at = input_at;
    }
    memcpy(request_bytes, magic, sizeof magic);
    end_request(request, at);
    return true;
}

struct span request_input(const struct frame *request)
{
    return (struct span){.at = request_bytes + input_at, .length = request->length - input_at};
}

void shorten_request(struct frame *request)
{
    if (request->length - input_at > INPUT_KEPT)
        end_request(request, input_at);
}

enum answer_state examine_answer(const struct frame *received)
{
    if (memcmp(received->bytes, magic, received->length < sizeof magic ? received->length : sizeof magic) != 0)
        return ANSWER_MALFORMED;
    if (received->length < FRAME_HEAD)
        return ANSWER_PARTIAL;
    size_t body = 0;
    for (size_t i = 4; i < FRAME_HEAD; i++)
        body = body << 8 | received->bytes[i];
    if (body == 0 || body > ANSWER_LIMIT || received->length > FRAME_HEAD + body)
        return ANSWER_MALFORMED;
    return received->length == FRAME_HEAD + body ? ANSWER_COMPLETE : ANSWER_PARTIAL;
}

int answer_exit(const struct frame *answer)
{
    return answer->bytes[FRAME_HEAD];
}

const unsigned char *answer_body(const struct frame *answer)
{
    return answer->bytes + FRAME_HEAD + 1;
}

size_t answer_body_length(const struct frame *answer)
{
    return answer->length - FRAME_HEAD - 1;
}
