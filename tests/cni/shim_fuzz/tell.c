/* The error objects: JSON that anybody can read, whatever bytes are in the words. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "report.h"
#include "target.h"

/* The length of a UTF-8 sequence, decoded arithmetically (the code under test goes by a table); 0 if it is none. */
static size_t decode(const uint8_t *at, size_t left)
{
    size_t length = at[0] < 0x80 ? 1 : at[0] >= 0xf0 ? 4 : at[0] >= 0xe0 ? 3 : at[0] >= 0xc0 ? 2 : 0;
    if (length == 0 || length > left || at[0] >= 0xf8)
        return 0;
    uint32_t point = length == 1 ? at[0] : at[0] & (0x7fu >> length);
    for (size_t i = 1; i < length; i++) {
        if ((at[i] & 0xc0) != 0x80)
            return 0;
        point = point << 6 | (at[i] & 0x3f);
    }
    static const uint32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
    bool fits = point >= least[length] && point <= 0x10ffff && (point < 0xd800 || point > 0xdfff);
    return fits ? length : 0;
}

/* Passes over a JSON string; returns what follows its closing quote. */
static const uint8_t *pass_string(const uint8_t *at, const uint8_t *end)
{
    MUST(at < end && *at == '"');
    at++;
    while (at < end && *at != '"') {
        MUST(*at >= 0x20);
        if (*at == '\\') {
            MUST(end - at >= 2);
            if (at[1] == 'u') {
                MUST(end - at >= 6);
                MUST(memchr("0123456789abcdef", at[5], 16) != NULL && memcmp(at + 2, "d8", 2) != 0);
                at += 6;
            } else {
                MUST(at[1] == '"' || at[1] == '\\');
                at += 2;
            }
            continue;
        }
        size_t length = decode(at, (size_t)(end - at));
        MUST(length > 0);
        at += length;
    }
    MUST(at < end);
    return at + 1;
}

static const uint8_t *pass(const uint8_t *at, const uint8_t *end, const char *literal)
{
    size_t length = strlen(literal);
    MUST((size_t)(end - at) >= length && memcmp(at, literal, length) == 0);
    return at + length;
}

/* The bytes up to the first NUL are the thing, those behind it the reason. The first byte repeats them. */
const char *try_report(const uint8_t *bytes, size_t length)
{
    size_t times = length > 0 && bytes[0] >= 0xf0 ? 40 : 1;
    char *text = malloc(length * times + 2);
    for (size_t i = 0; i < times; i++)
        memcpy(text + i * length, bytes, length);
    memset(text + length * times, 0, 2);
    const char *thing = text, *why = text + strlen(text) + 1;
    if (why > text + length * times)
        why = NULL;
    char *object = malloc(REPORT_SIZE);
    size_t made = compose_report(&(struct trouble){.code = 11, .msg = "m", .thing = thing, .why = why}, object);
    MUST(made <= REPORT_SIZE);
    const uint8_t *at = (const uint8_t *)object, *end = at + made;
    at = pass(at, end, "{\"cniVersion\":\"1.1.0\",\"code\":11,\"msg\":\"m\",\"details\":");
    at = pass_string(at, end);
    at = pass(at, end, "}\n");
    MUST(at == end);
    free(object);
    free(text);
    return "told";
}
