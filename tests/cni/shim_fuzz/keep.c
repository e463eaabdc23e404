/* The request, made from an environment and an input and read again; and kept in a spool. */
#include <dirent.h>
#include <fcntl.h>
#include <ftw.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "deadline.h"
#include "frame.h"
#include "spool.h"
#include "target.h"

static const char *const names[] = {"CNI_COMMAND", "CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_ARGS", "CNI_PATH"};
enum { NAMES = sizeof names / sizeof names[0] };

static void give_input(const uint8_t *bytes, size_t length, size_t times)
{
    static int file = -1;
    if (file < 0) {
        file = memfd_create("input", MFD_CLOEXEC);
        must(file >= 0 && dup2(file, STDIN_FILENO) == STDIN_FILENO, "memfd_create");
    }
    must(ftruncate(file, 0) == 0 && lseek(file, 0, SEEK_SET) == 0, "lseek");
    for (size_t i = 0; i < times; i++)
        must(write(file, bytes, length) == (ssize_t)length, "write");
    must(lseek(file, 0, SEEK_SET) == 0, "lseek");
}

/* Flags, then six values that end with NUL (a first byte 1: the variable is not set), then the input. */
const char *try_request(const uint8_t *bytes, size_t length)
{
    if (length == 0)
        return "nothing";
    uint8_t flags = bytes[0];
    const uint8_t *at = bytes + 1, *end = bytes + length;
    char *values[NAMES] = {NULL};
    size_t stretch = flags >= 0xf0 && flags & 1 ? 20000 : 0;
    for (size_t i = 0; i < NAMES; i++) {
        const uint8_t *nul = at < end ? memchr(at, 0, (size_t)(end - at)) : NULL;
        if (nul == NULL)
            nul = end;
        size_t size = (size_t)(nul - at);
        unsetenv(names[i]);
        if (size > 0 && at[0] != 1) {
            values[i] = malloc(size + stretch + 1);
            memcpy(values[i], at, size);
            memset(values[i] + size, 'x', stretch);
            values[i][size + stretch] = 0;
            setenv(names[i], values[i], 1);
        }
        at = nul < end ? nul + 1 : end;
    }
    size_t times = flags >= 0xf0 && flags & 2 ? 300 : 1, input = (size_t)(end - at);
    give_input(at, input, times);
    struct frame request;
    struct trouble trouble = {0};
    enum input_need need = flags & 4 ? INPUT_IF_SOUND : INPUT_NEEDED;
    bool made = compose_request(&request, need, now_ms() + 20000, &trouble);
    if (made) {
        const unsigned char *read = request.bytes, *stop = request.bytes + request.length;
        size_t body = (size_t)read[4] << 24 | (size_t)read[5] << 16 | (size_t)read[6] << 8 | read[7];
        MUST(memcmp(read, "NFC1", 4) == 0 && body == request.length - FRAME_HEAD && body <= REQUEST_LIMIT);
        read += FRAME_HEAD;
        for (size_t i = 0; i < NAMES; i++) {
            if (values[i] == NULL)
                continue;
            size_t name = strlen(names[i]), size = strlen(values[i]);
            MUST((size_t)(stop - read) > name + size + 2);
            MUST(memcmp(read, names[i], name) == 0 && read[name] == '=');
            MUST(memcmp(read + name + 1, values[i], size + 1) == 0);
            read += name + size + 2;
        }
        static const char beats[] = "NODEFABRIC_BEATS=1";
        MUST((size_t)(stop - read) > sizeof beats && memcmp(read, beats, sizeof beats) == 0);
        read += sizeof beats;
        MUST(read < stop && *read == 0);
        size_t left = (size_t)(stop - read) - 1;
        MUST(left == input * times || (left == 0 && need == INPUT_IF_SOUND));
        MUST(left == 0 || memcmp(read + 1, at, input) == 0);
    } else {
        MUST(trouble.code != 0 && trouble.msg != NULL);
    }
    for (size_t i = 0; i < NAMES; i++)
        free(values[i]);
    return made ? "made" : "refused";
}

static int remove_one(const char *path, const struct stat *found, int kind, struct FTW *where)
{
    (void)found;
    (void)kind;
    return where->level == 0 ? 0 : remove(path);
}

/* Counts the files of a folder, and those among them that hold exactly the request. */
static size_t count_files(const char *path, const struct frame *request, size_t *same)
{
    size_t count = 0;
    *same = 0;
    DIR *folder = opendir(path);
    must(folder != NULL, path);
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        if (entry->d_name[0] == '.' && (entry->d_name[1] == 0 || entry->d_name[1] == '.'))
            continue;
        MUST(entry->d_name[0] != '.');
        count++;
        uint8_t content[8192];
        int file = openat(dirfd(folder), entry->d_name, O_RDONLY | O_CLOEXEC);
        must(file >= 0, entry->d_name);
        ssize_t size = read(file, content, sizeof content);
        close(file);
        *same += size == (ssize_t)request->length && memcmp(content, request->bytes, request->length) == 0;
    }
    closedir(folder);
    return count;
}

static char base[64];

static void remove_base(void)
{
    nftw(base, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    rmdir(base);
}

/* A path below a folder of ours, up to the first NUL; behind it the request, twice: once with its last byte changed. */
const char *try_spool(const uint8_t *bytes, size_t length)
{
    if (base[0] == 0) {
        const char *places[] = {"/dev/shm/nf-fuzz-XXXXXX", "/tmp/nf-fuzz-XXXXXX"};
        strcpy(base, places[access("/dev/shm", W_OK) != 0]);
        must(mkdtemp(base) != NULL && atexit(remove_base) == 0, base);
    }
    const uint8_t *nul = length > 0 ? memchr(bytes, 0, length) : NULL;
    if (nul == NULL)
        return "nothing";
    size_t size = (size_t)(nul - bytes);
    char *path = malloc(sizeof base + 1 + size + 1);
    int head = sprintf(path, "%s/", base);
    memcpy(path + head, bytes, size + 1);
    for (char *at = path + head; (at = strstr(at, "..")) != NULL;)
        *at = '_'; /* stay below */
    size_t body = length - size - 1;
    unsigned char *content = malloc(body + 1);
    memcpy(content, nul + 1, body);
    content[body] = 0;
    struct frame requests[2] = {{.bytes = content, .length = body}, {.bytes = content, .length = body + 1}};
    bool done = false;
    for (size_t i = 0; i < 2; i++) {
        struct trouble trouble = {0};
        done = spool_request(path, &requests[i], &trouble);
        if (!done) {
            MUST(trouble.code == TRY_AGAIN_LATER && trouble.thing == path && trouble.why != NULL);
            MUST(i == 0);
            break;
        }
        size_t same = 0;
        MUST(count_files(path, &requests[i], &same) == i + 1 && same == 1);
        MUST(spool_request(path, &requests[i], &trouble));
        MUST(count_files(path, &requests[i], &same) == i + 1 && same == 1);
    }
    nftw(base, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    free(content);
    free(path);
    return done ? "kept" : "refused";
}
