#include "report.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* An error object under construction. `append` clips what does not fit, so `close_object` always does. */
struct text {
    size_t length;
    char *bytes; /* REPORT_SIZE of them */
};

enum { CLOSING_ROOM = 8 };

static void append(struct text *text, const char *bytes, size_t length)
{
    if (length > REPORT_SIZE - CLOSING_ROOM - text->length)
        return;
    memcpy(text->bytes + text->length, bytes, length);
    text->length += length;
}

static void append_literal(struct text *text, const char *literal)
{
    append(text, literal, strlen(literal));
}

static void append_number(struct text *text, int number)
{
    char digits[12];
    size_t at = sizeof digits;
    do {
        digits[--at] = (char)('0' + number % 10);
        number /= 10;
    } while (number > 0);
    append(text, digits + at, sizeof digits - at);
}

/* RFC 3629, table 3-7 of Unicode. */
size_t utf8_length(const unsigned char *at)
{
    unsigned char low = 0x80, high = 0xbf;
    size_t length;
    if (at[0] >= 0xc2 && at[0] <= 0xdf) {
        length = 2;
    } else if (at[0] >= 0xe0 && at[0] <= 0xef) {
        length = 3;
        if (at[0] == 0xe0)
            low = 0xa0;
        if (at[0] == 0xed)
            high = 0x9f;
    } else if (at[0] >= 0xf0 && at[0] <= 0xf4) {
        length = 4;
        if (at[0] == 0xf0)
            low = 0x90;
        if (at[0] == 0xf4)
            high = 0x8f;
    } else {
        return 0;
    }
    for (size_t i = 1; i < length; i++) {
        if (at[i] < low || at[i] > high) /* also where the string ends: NUL is below `low` */
            return 0;
        low = 0x80;
        high = 0xbf;
    }
    return length;
}

/* Appends the inside of a JSON string. A byte that is no UTF-8 becomes U+FFFD: JSON cannot carry it. */
static void append_escaped(struct text *text, const char *string)
{
    static const char hex[] = "0123456789abcdef";
    const unsigned char *at = (const unsigned char *)string;
    while (*at != 0) {
        if (*at >= 0x80) {
            size_t length = utf8_length(at);
            if (length == 0)
                append_literal(text, "\\ufffd");
            else
                append(text, (const char *)at, length);
            at += length == 0 ? 1 : length;
            continue;
        }
        if (*at == '"' || *at == '\\') {
            char escaped[2] = {'\\', (char)*at};
            append(text, escaped, sizeof escaped);
        } else if (*at < 0x20 || *at == 0x7f) {
            char escaped[6] = {'\\', 'u', '0', '0', hex[*at >> 4], hex[*at & 15]};
            append(text, escaped, sizeof escaped);
        } else {
            append(text, (const char *)at, 1);
        }
        at++;
    }
}

static void close_object(struct text *text)
{
    memcpy(text->bytes + text->length, "\"}\n", 3);
    text->length += 3;
}

size_t compose_report(const struct trouble *trouble, char object[REPORT_SIZE])
{
    struct text text = {.length = 0, .bytes = object};
    append_literal(&text, "{\"cniVersion\":\"1.1.0\",\"code\":");
    append_number(&text, trouble->code);
    append_literal(&text, ",\"msg\":\"");
    append_escaped(&text, trouble->msg);
    append_literal(&text, "\",\"details\":\"");
    if (trouble->thing != NULL)
        append_escaped(&text, trouble->thing);
    if (trouble->thing != NULL && trouble->why != NULL)
        append_literal(&text, ": ");
    if (trouble->why != NULL)
        append_escaped(&text, trouble->why);
    close_object(&text);
    return text.length;
}

int report(const struct trouble *trouble)
{
    static char object[REPORT_SIZE];
    print_all(object, compose_report(trouble, object));
    return EXIT_FAILURE;
}

bool print_all(const void *bytes, size_t length)
{
    const char *at = bytes;
    while (length > 0) {
        ssize_t written = write(STDOUT_FILENO, at, length);
        if (written > 0) {
            at += written;
            length -= (size_t)written;
        } else if (written < 0 && errno == EAGAIN) { /* the runtime's pipe may be non-blocking */
            struct pollfd out = {.fd = STDOUT_FILENO, .events = POLLOUT};
            poll(&out, 1, -1);
        } else if (written < 0 && errno != EINTR) {
            return false;
        }
    }
    return true;
}
