/* What the relay decides without the agent: whether a configuration asks for nothing by itself, and whether a pod has
 * nothing. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "holders.h"
#include "netconf.h"
#include "target.h"

static bool judge(const uint8_t *bytes, size_t length, const char *more, struct span *previous)
{
    size_t added = strlen(more);
    unsigned char *text = malloc(length + added + 1);
    memcpy(text, bytes, length);
    memcpy(text + length, more, added + 1);
    bool chained = is_chained((struct span){.at = text, .length = length + added}, previous);
    if (chained && previous->at != NULL) {
        MUST(previous->at > text && previous->at + previous->length < text + length);
        MUST(previous->at[0] == '{' && previous->at[previous->length - 1] == '}');
        previous->at = bytes + (previous->at - text);
    }
    free(text);
    return chained;
}

const char *try_netconf(const uint8_t *bytes, size_t length)
{
    struct span previous, ignored;
    bool chained = judge(bytes, length, "", &previous);
    MUST(judge(bytes, length, " \r\n\t", &ignored) == chained);
    if (!chained)
        return "asked";
    MUST(!judge(bytes, length, "}", &ignored) && !judge(bytes, length, "{}", &ignored));
    MUST(memmem(bytes, length, "\"nodefabric\"", 12) != NULL && memmem(bytes, length, "\"cniVersion\"", 12) != NULL);
    MUST(!judge(bytes, length - 1, "", &ignored) || strchr(" \r\n\t", bytes[length - 1]) != NULL);
    if (previous.at == NULL)
        return "chained";
    /* What was passed over byte for byte is a value by itself: it could be the result of a plugin before. */
    unsigned char *again = malloc(length + 128);
    int head = sprintf((char *)again, "{\"cniVersion\":\"1.0.0\",\"name\":\"n\",\"type\":\"nodefabric\",\"capabilities\":");
    memcpy(again + head, previous.at, previous.length);
    memcpy(again + head + previous.length, "}", 2);
    MUST(is_chained((struct span){.at = again, .length = (size_t)head + previous.length + 1}, &ignored));
    free(again);
    return "passed";
}

static char base[64];

static void remove_base(void)
{
    char path[96];
    sprintf(path, "%s/s.pods", base);
    unlink(path);
    rmdir(base);
}

/* Tells whether a text of the lines between two line breaks has one that is exactly this, by reading each. */
static bool has(const uint8_t *lines, size_t length, const char *first, const char *separator, const char *second)
{
    size_t wanted = strlen(first) + strlen(separator) + strlen(second);
    char *line = malloc(wanted + 1);
    sprintf(line, "%s%s%s", first, separator, second);
    bool found = false;
    for (size_t at = 0; at < length && !found;) {
        const uint8_t *stop = memchr(lines + at, '\n', length - at);
        size_t size = stop == NULL ? length - at : (size_t)(stop - lines) - at;
        found = stop != NULL && size == wanted && memcmp(lines + at, line, wanted) == 0;
        at += size + 1;
    }
    free(line);
    return found;
}

/* The last value of a name in CNI_ARGS, or an empty text. */
static char *argument(const char *arguments, const char *name)
{
    char *copy = strdup(arguments), *rest = copy, *found = strdup("");
    for (char *part; (part = strsep(&rest, ";")) != NULL;) {
        size_t length = strlen(name);
        if (strncmp(part, name, length) == 0 && part[length] == '=') {
            free(found);
            found = strdup(part + length + 1);
        }
    }
    free(copy);
    return found;
}

/* Flags, CNI_CONTAINERID and CNI_ARGS that each end with NUL, then the file; with a right head before it, unless the
 * flags say otherwise. */
const char *try_holders(const uint8_t *bytes, size_t length)
{
    if (base[0] == 0) {
        const char *places[] = {"/dev/shm/nf-fuzz-XXXXXX", "/tmp/nf-fuzz-XXXXXX"};
        strcpy(base, places[access("/dev/shm", W_OK) != 0]);
        must(mkdtemp(base) != NULL && atexit(remove_base) == 0, base);
    }
    if (length == 0)
        return "nothing";
    uint8_t flags = bytes[0];
    const uint8_t *at = bytes + 1, *stop = bytes + length;
    char *values[2];
    for (size_t i = 0; i < 2; i++) {
        size_t size = strnlen((const char *)at, (size_t)(stop - at));
        values[i] = strndup((const char *)at, size);
        at += size < (size_t)(stop - at) ? size + 1 : size;
    }
    setenv("CNI_CONTAINERID", values[0], 1);
    setenv("CNI_ARGS", values[1], 1);

    char path[96], socket_path[96], head[128], id[64] = "";
    FILE *boot = fopen("/proc/sys/kernel/random/boot_id", "re");
    must(boot != NULL && fgets(id, sizeof id, boot) != NULL, "boot_id");
    fclose(boot);
    sprintf(socket_path, "%s/s", base);
    sprintf(path, "%s/s.pods", base);
    int headed = flags & 1 ? 0 : sprintf(head, "nodefabric-pods 2\nboot %sunknown 0\n", id);
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    must(file >= 0 && fchmod(file, flags & 2 ? 0640 : 0600) == 0, path);
    must(write(file, head, (size_t)headed) == headed, path);
    size_t left = (size_t)(stop - at), times = flags >= 0xf0 ? 100 : 1;
    for (size_t i = 0; i < times; i++)
        must(write(file, at, left) == (ssize_t)left, path);
    close(file);

    bool known = holders_are_known(socket_path), nothing = pod_has_nothing(socket_path);
    MUST(known || !nothing);
    if (flags & 1 ? memmem(at, left, id, strlen(id)) == NULL : left * times < 4)
        MUST(!known);
    MUST(!known || !(flags & 2));
    MUST(!known || (left >= 4 && memcmp(stop - 4, "end\n", 4) == 0 && left * times <= (256 << 10)));
    if (nothing && !(flags & 1)) {
        char *name = argument(values[1], "K8S_POD_NAME"), *name_space = argument(values[1], "K8S_POD_NAMESPACE");
        char *uid = argument(values[1], "K8S_POD_UID");
        MUST(*values[0] != 0 && *name != 0 && *name_space != 0 && *uid != 0);
        MUST(!has(at, left, values[0], "", "") && !has(at, left, name_space, "/", name));
        MUST(!has(at, left, uid, "", "") && !has(at, left, name_space, "/", ""));
        free(name);
        free(name_space);
        free(uid);
    }
    free(values[0]);
    free(values[1]);
    return nothing ? "nothing there" : known ? "known" : "unknown";
}
