#include "netconf.h"

#include <stdint.h>
#include <string.h>
#include <strings.h>

#include "report.h"

enum { LONGEST = 64 << 10, DEEPEST = 32, LONGEST_NAME = 255, MOST_DIGITS = 18 };

/* Keys that ask for nothing, whatever they say, and those that are looked at. Any other is the agent's to judge. */
enum key { CNI_VERSION, NAME, TYPE, PREV_RESULT, RUNTIME_CONFIG };
static const char *const keys[] = {
    [CNI_VERSION] = "cniVersion",
    [NAME] = "name",
    [TYPE] = "type",
    [PREV_RESULT] = "prevResult",
    [RUNTIME_CONFIG] = "runtimeConfig",
    "capabilities",
    "cniVersions",
    "disableCheck",
    "disableGC",
    "dns",
    "logFile",
    "logLevel",
    "loadOnlyInlinedPlugins",
};
enum { KEYS = sizeof keys / sizeof keys[0] };

static const char *const versions[] = {"\"0.3.1\"", "\"0.4.0\"", "\"1.0.0\"", "\"1.1.0\""};

/* What a runtime may say for one pod and our plugin heeds. */
static const char *const heeded[] = {"deviceID", "pciBusID", "mac", "infinibandGUID", "CNIDeviceInfoFile"};

struct scan {
    const unsigned char *at, *end;
};

bool equals(struct span span, const char *text)
{
    return span.length == strlen(text) && memcmp(span.at, text, span.length) == 0;
}

static bool is_alphanumeric(unsigned char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9');
}

bool is_name(struct span span)
{
    if (span.length == 0 || span.length > LONGEST_NAME || !is_alphanumeric(span.at[0]))
        return false;
    for (size_t i = 1; i < span.length; i++)
        if (!is_alphanumeric(span.at[i]) && span.at[i] != '_' && span.at[i] != '.' && span.at[i] != '-')
            return false;
    return true;
}

static void pass_space(struct scan *scan)
{
    while (scan->at < scan->end && (*scan->at == ' ' || (*scan->at >= '\t' && *scan->at <= '\n') || *scan->at == '\r'))
        scan->at++;
}

static bool pass_byte(struct scan *scan, char wanted)
{
    if (scan->at == scan->end || *scan->at != (unsigned char)wanted)
        return false;
    scan->at++;
    return true;
}

static bool is_hex(unsigned char c)
{
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

/* Passes what follows a backslash. Half of a surrogate pair may stand for no letter at all. */
static bool pass_escape(struct scan *scan)
{
    if (scan->end - scan->at >= 1 && *scan->at != 0 && strchr("\"\\/bfnrt", *scan->at) != NULL) {
        scan->at++;
        return true;
    }
    if (scan->end - scan->at < 5 || *scan->at != 'u')
        return false;
    for (size_t i = 1; i < 5; i++)
        if (!is_hex(scan->at[i]))
            return false;
    if ((scan->at[1] == 'd' || scan->at[1] == 'D') && scan->at[2] > '7')
        return false;
    scan->at += 5;
    return true;
}

/* Passes a string, and fills `inside` with what is between its quotes. */
static bool pass_string(struct scan *scan, struct span *inside)
{
    if (!pass_byte(scan, '"'))
        return false;
    inside->at = scan->at;
    while (scan->at < scan->end && *scan->at >= 0x20) {
        inside->length = (size_t)(scan->at - inside->at);
        unsigned char c = *scan->at;
        size_t length = c < 0x80 ? 1 : utf8_length(scan->at);
        if (length == 0)
            return false;
        scan->at += length;
        if (c == '"')
            return true;
        if (c == '\\' && !pass_escape(scan))
            return false;
    }
    return false;
}

/* Passes true, false, null or a whole number: no result of a plugin has others. What follows it is looked at next. */
static bool pass_plain(struct scan *scan)
{
    static const char *const words[] = {"true", "false", "null"};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        size_t length = strlen(words[i]);
        if ((size_t)(scan->end - scan->at) >= length && memcmp(scan->at, words[i], length) == 0) {
            scan->at += length;
            return true;
        }
    }
    pass_byte(scan, '-');
    const unsigned char *first = scan->at;
    while (scan->at < scan->end && *scan->at >= '0' && *scan->at <= '9')
        scan->at++;
    size_t digits = (size_t)(scan->at - first);
    return digits == 1 || (digits > 1 && digits <= MOST_DIGITS && *first != '0');
}

static bool pass_key(struct scan *scan, struct span *key)
{
    pass_space(scan);
    if (!pass_string(scan, key))
        return false;
    pass_space(scan);
    return pass_byte(scan, ':');
}

/* Passes a value with all that is in it. Of each level that is open a bit tells whether it is an object. */
static bool pass_value(struct scan *scan)
{
    uint64_t objects = 0;
    unsigned depth = 0;
    struct span ignored;
    for (;;) {
        pass_space(scan);
        bool is_object = pass_byte(scan, '{'), opens = is_object || pass_byte(scan, '[');
        if (opens) {
            if (++depth > DEEPEST)
                return false;
            objects = objects << 1 | is_object;
            pass_space(scan);
            if (!pass_byte(scan, is_object ? '}' : ']')) {
                if (is_object && !pass_key(scan, &ignored))
                    return false;
                continue;
            }
            depth--;
            objects >>= 1;
        } else if (scan->at < scan->end && *scan->at == '"') {
            if (!pass_string(scan, &ignored))
                return false;
        } else if (!pass_plain(scan)) {
            return false;
        }
        for (;;) { /* a value has ended, and with it as many levels as are closed now */
            if (depth == 0)
                return true;
            pass_space(scan);
            if (pass_byte(scan, ','))
                break;
            if (!pass_byte(scan, objects & 1 ? '}' : ']'))
                return false;
            depth--;
            objects >>= 1;
        }
        if (objects & 1 && !pass_key(scan, &ignored))
            return false;
    }
}

/* An object whose members are passed one after the other. */
struct object {
    struct scan scan;
    bool has_begun;
};

enum step { MEMBER, END, WRONG };

/* A key that is spelt with escapes is wrong: it could be any key. */
static enum step next(struct object *object, struct span *key, struct span *value)
{
    struct scan *scan = &object->scan;
    pass_space(scan);
    if (!object->has_begun && !pass_byte(scan, '{'))
        return WRONG;
    pass_space(scan);
    if (pass_byte(scan, '}'))
        return END;
    if ((object->has_begun && !pass_byte(scan, ',')) || !pass_key(scan, key) || memchr(key->at, '\\', key->length) != NULL)
        return WRONG;
    object->has_begun = true;
    pass_space(scan);
    value->at = scan->at;
    if (!pass_value(scan))
        return WRONG;
    value->length = (size_t)(scan->at - value->at);
    return MEMBER;
}

static struct object open_object(struct span text)
{
    return (struct object){.scan = {.at = text.at, .end = text.at + text.length}};
}

static bool asks_for_nothing(struct span runtime_config)
{
    if (equals(runtime_config, "null"))
        return true;
    struct object object = open_object(runtime_config);
    struct span key, value;
    enum step step;
    while ((step = next(&object, &key, &value)) == MEMBER)
        for (size_t i = 0; i < sizeof heeded / sizeof heeded[0]; i++)
            if (key.length == strlen(heeded[i]) && strncasecmp((const char *)key.at, heeded[i], key.length) == 0)
                return false;
    return step == END;
}

/* Whether a result is one, and in this version: else it would have to be told in another. */
static bool is_in_version(struct span result, struct span version)
{
    struct object object = open_object(result);
    struct span key, value;
    enum step step;
    size_t told = 0;
    while ((step = next(&object, &key, &value)) == MEMBER) {
        if (!equals(key, "cniVersion"))
            continue;
        if (value.length != version.length || memcmp(value.at, version.at, value.length) != 0)
            return false;
        told++;
    }
    return step == END && told == 1;
}

static bool is_known_version(struct span value)
{
    for (size_t i = 0; i < sizeof versions / sizeof versions[0]; i++)
        if (equals(value, versions[i]))
            return true;
    return false;
}

bool is_chained(struct span text, struct span *previous)
{
    struct object object = open_object(text);
    struct span key, value, found[KEYS] = {{.at = NULL, .length = 0}};
    enum step step;
    if (text.length > LONGEST)
        return false;
    while ((step = next(&object, &key, &value)) == MEMBER) {
        size_t which = 0;
        while (which < KEYS && !equals(key, keys[which]))
            which++;
        if (which == KEYS || found[which].at != NULL)
            return false;
        found[which] = value;
    }
    pass_space(&object.scan);
    if (step != END || object.scan.at != object.scan.end)
        return false;
    struct span name = found[NAME];
    if (name.length < 2 || name.at[0] != '"' || !is_name((struct span){.at = name.at + 1, .length = name.length - 2}))
        return false;
    if (found[TYPE].at == NULL || !equals(found[TYPE], "\"nodefabric\"") || !is_known_version(found[CNI_VERSION]))
        return false;
    if (found[RUNTIME_CONFIG].at != NULL && !asks_for_nothing(found[RUNTIME_CONFIG]))
        return false;
    *previous = found[PREV_RESULT];
    return previous->at == NULL || is_in_version(*previous, found[CNI_VERSION]);
}
