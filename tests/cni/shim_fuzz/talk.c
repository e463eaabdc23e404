/* The agent's answer, whole and as it trickles in; and times given in the environment. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "deadline.h"
#include "frame.h"
#include "link.h"
#include "target.h"

const char *try_answer(const uint8_t *bytes, size_t length)
{
    enum answer_state before = ANSWER_PARTIAL, now = ANSWER_PARTIAL;
    for (size_t part = 0; part <= length; part++, before = now) {
        now = examine_answer(&(struct frame){.bytes = bytes, .length = part});
        MUST(before != ANSWER_MALFORMED || now == ANSWER_MALFORMED);
        MUST(before != ANSWER_COMPLETE || now == ANSWER_MALFORMED); /* something follows it */
        MUST(now != ANSWER_COMPLETE || part > FRAME_HEAD);
    }
    if (now != ANSWER_COMPLETE)
        return now == ANSWER_PARTIAL ? "partial" : "malformed";
    struct frame whole = {.bytes = bytes, .length = length};
    MUST(answer_exit(&whole) == bytes[FRAME_HEAD]);
    MUST(answer_body(&whole) + answer_body_length(&whole) == bytes + length);
    return "complete";
}

/* The first byte says in how many pieces the rest comes, and whether the agent hangs up after it. */
const char *try_link(const uint8_t *bytes, size_t length)
{
    static const unsigned char asked[] = "NFC1\0\0\0\1";
    struct frame request = {.bytes = asked, .length = sizeof asked};
    if (length == 0)
        return "nothing";
    int ends[2];
    must(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0, "socketpair");
    size_t pieces = 1 + (bytes[0] & 7), rest = length - 1;
    for (size_t i = 0; i < pieces; i++) {
        size_t from = rest * i / pieces, to = rest * (i + 1) / pieces;
        if (to > from)
            MUST(send(ends[1], bytes + 1 + from, to - from, MSG_NOSIGNAL) == (ssize_t)(to - from));
    }
    bool hangs_up = (bytes[0] & 8) == 0;
    if (hangs_up && bytes[0] & 16)
        close(ends[1]); /* with the request unread */
    else if (hangs_up)
        shutdown(ends[1], SHUT_WR);
    int64_t silence = hangs_up ? 20000 : 0, deadline = now_ms() + (bytes[0] & 64 ? 20000 : silence);
    struct exchange exchange = ask_over(ends[0], &request, bytes[0] & 32 ? ends[0] : -1, deadline, silence);
    if (exchange.outcome == ANSWERED)
        MUST(examine_answer(&exchange.answer) == ANSWER_COMPLETE && exchange.answer.length <= rest);
    else
        MUST(exchange.why != NULL && *exchange.why != 0);
    close(ends[0]);
    if (!(hangs_up && bytes[0] & 16))
        close(ends[1]);
    return exchange.outcome == ANSWERED ? "answered" : exchange.outcome == AGENT_AWAY ? "away" : "none";
}

const char *try_wait(const uint8_t *bytes, size_t length)
{
    char *text = malloc(length + 1);
    memcpy(text, bytes, length);
    text[length] = 0;
    int64_t milliseconds = -1;
    bool taken = parse_seconds(text, &milliseconds);
    size_t digits = strspn(text, "0123456789"), part = 0;
    if (text[digits] == '.')
        part = 1 + strspn(text + digits + 1, "0123456789");
    bool is_time = digits > 0 && text[digits + part] == 0;
    double value = is_time ? strtod(text, NULL) : -1;
    MUST(!taken || is_time);
    MUST(!is_time || value > 3600 || taken);
    MUST(!taken || (milliseconds >= 0 && milliseconds <= 3600000));
    MUST(!taken || ((double)milliseconds <= value * 1000 + 0.001 && (double)milliseconds > value * 1000 - 1.001));
    free(text);
    return taken ? "taken" : "refused";
}
