#include "holders.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "netconf.h"
#include "served.h"

enum { LONGEST_FILE = 256 << 10, LONGEST_LINE = 520, BOOT_ID_LENGTH = 36 };

static const char begin[] = "nodefabric-pods 2\nboot ", all_known[] = "\nunknown 0\n", end[] = "\nend\n";

enum { HEAD = sizeof begin - 1 + BOOT_ID_LENGTH + sizeof all_known - 1 };

/* What the runtime says of a pod. `at` is NULL for what it does not say. */
struct pod {
    struct span container_id, name, name_space, uid;
};

static unsigned char text[LONGEST_FILE + 1]; /* one more shows that there is more */

/* Reads a whole file into `bytes`; 0 if there is none, or more than `size`. */
static size_t read_file(int file, unsigned char *bytes, size_t size)
{
    size_t length = 0;
    while (length < size) {
        ssize_t got = read(file, bytes + length, size - length);
        if (got == 0)
            return length;
        if (got > 0)
            length += (size_t)got;
        else if (errno != EINTR)
            return 0;
    }
    return 0;
}

static bool append_boot_id(char *at)
{
    unsigned char id[BOOT_ID_LENGTH + 2];
    int file = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return false;
    size_t length = read_file(file, id, sizeof id);
    close(file);
    memcpy(at, id, BOOT_ID_LENGTH);
    return length == BOOT_ID_LENGTH + 1 && id[BOOT_ID_LENGTH] == '\n';
}

/* Reads the file, if it is one that only the agent can have written, as it is. Returns its length, or 0. */
static size_t read_own_file(const char *path)
{
    struct stat found;
    int file = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (file < 0)
        return 0;
    size_t length = 0;
    if (fstat(file, &found) == 0 && S_ISREG(found.st_mode) && found.st_uid == geteuid() && (found.st_mode & 0077) == 0)
        length = read_file(file, text, sizeof text);
    close(file);
    return length;
}

/* Finds the lines that name the pods, with the line break before them. False if not all are there that should be. */
static bool read_names(const char *socket_path, struct span *names)
{
    char head[HEAD], path[BESIDE_SIZE];
    memcpy(head, begin, sizeof begin - 1);
    memcpy(head + HEAD - (sizeof all_known - 1), all_known, sizeof all_known - 1);
    if (!append_boot_id(head + sizeof begin - 1) || !name_beside(socket_path, ".pods", path))
        return false;
    size_t length = read_own_file(path), closing = sizeof end - 1;
    if (length < HEAD - 1 + closing || memcmp(text, head, HEAD) != 0)
        return false;
    *names = (struct span){.at = text + HEAD - 1, .length = length - (HEAD - 1)};
    return memcmp(text + length - closing, end, closing) == 0;
}

static bool has_line(struct span names, struct span first, const char *separator, struct span second)
{
    char line[LONGEST_LINE];
    size_t between = strlen(separator), length = 0;
    if (first.length + between + second.length > sizeof line - 2)
        return true; /* which cannot be, of names; and what is certain is only told of those */
    line[length++] = '\n';
    memcpy(line + length, first.at, first.length);
    length += first.length;
    memcpy(line + length, separator, between);
    length += between;
    if (second.length > 0)
        memcpy(line + length, second.at, second.length);
    length += second.length;
    line[length++] = '\n';
    return memmem(names.at, names.length, line, length) != NULL;
}

/* Takes one NAME=VALUE of CNI_ARGS. False for one that the agent has to look at: it refuses what is malformed, and
 * heeds a MAC. */
static bool take_argument(struct span argument, struct pod *pod)
{
    static const char *const wanted[] = {"K8S_POD_NAMESPACE", "K8S_POD_NAME", "K8S_POD_UID"};
    struct span *const places[] = {&pod->name_space, &pod->name, &pod->uid};
    const unsigned char *equals_sign = memchr(argument.at, '=', argument.length);
    if (equals_sign == NULL)
        return false;
    for (size_t i = 0; i < argument.length; i++)
        if (argument.at[i] < 0x20 || argument.at[i] > 0x7e)
            return false;
    struct span name = {.at = argument.at, .length = (size_t)(equals_sign - argument.at)};
    struct span value = {.at = equals_sign + 1, .length = argument.length - name.length - 1};
    for (size_t i = 0; i < sizeof wanted / sizeof wanted[0]; i++) {
        if (!equals(name, wanted[i]))
            continue;
        if (places[i]->at != NULL || (value.length > 0 && !is_name(value)))
            return false;
        *places[i] = value;
    }
    return !equals(name, "MAC");
}

static bool read_pod(struct pod *pod)
{
    const char *id = getenv("CNI_CONTAINERID"), *arguments = getenv("CNI_ARGS");
    if (id == NULL || arguments == NULL)
        return false;
    *pod = (struct pod){.container_id = {.at = (const unsigned char *)id, .length = strlen(id)}};
    for (const char *at = arguments; *at != 0;) {
        size_t length = strcspn(at, ";");
        if (length > 0 && !take_argument((struct span){.at = (const unsigned char *)at, .length = length}, pod))
            return false;
        at += length + (at[length] == ';');
    }
    /* Of what kubelet noted itself the file has the pod's UID alone. */
    return is_name(pod->container_id) && pod->name.length > 0 && pod->name_space.length > 0 && pod->uid.length > 0;
}

bool holders_are_known(const char *socket_path)
{
    struct span names;
    return read_names(socket_path, &names);
}

bool pod_has_nothing(const char *socket_path)
{
    static const struct span nothing = {.at = NULL, .length = 0};
    struct span names;
    struct pod pod;
    if (!read_pod(&pod) || !read_names(socket_path, &names))
        return false;
    return !has_line(names, pod.container_id, "", nothing) && !has_line(names, pod.name_space, "/", pod.name) &&
           !has_line(names, pod.name_space, "/", nothing) && !has_line(names, pod.uid, "", nothing);
}
