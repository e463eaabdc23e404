#include "spool.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h> /* renameat */
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { NAME_SIZE = 64 };

static bool fail(struct trouble *trouble, const char *folder)
{
    *trouble = (struct trouble){
        .code = TRY_AGAIN_LATER,
        .msg = "the agent is away and this DEL cannot be kept for it",
        .thing = folder,
        .why = strerror(errno),
    };
    return false;
}

static char *put_digits(char *at, uint64_t number, unsigned base, size_t width)
{
    for (size_t i = width; i-- > 0; number /= base)
        at[i] = "0123456789abcdef"[number % base];
    return at + width;
}

/* "<nanoseconds>-<pid>-<random>": names of one clock sort by time, and no two are alike. */
static size_t make_name(char *name)
{
    struct timespec now;
    uint64_t chance = 0;
    clock_gettime(CLOCK_REALTIME, &now);
    if (getrandom(&chance, sizeof chance, GRND_NONBLOCK) < 0)
        chance = (uint64_t)(uintptr_t)&chance; /* early boot: the address is random too, and O_EXCL guards */
    char *at = put_digits(name, (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec, 10, 20);
    *at++ = '-';
    at = put_digits(at, (uint64_t)getpid(), 10, 10);
    *at++ = '-';
    at = put_digits(at, chance, 16, 16);
    return (size_t)(at - name);
}

/* fsync says EINVAL where a filesystem has nothing to sync. */
static bool sync_fd(int fd)
{
    return fsync(fd) == 0 || errno == EINVAL;
}

static bool sync_folder(const char *path)
{
    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0)
        return false;
    bool done = sync_fd(folder);
    int cause = errno;
    close(folder);
    errno = cause;
    return done;
}

/* Writes the folder that holds `path` to `parent`; false if that is the working folder or too long. */
static bool find_parent(const char *path, char parent[PATH_MAX])
{
    size_t length = strlen(path);
    while (length > 1 && path[length - 1] == '/')
        length--;
    while (length > 0 && path[length - 1] != '/')
        length--;
    while (length > 1 && path[length - 1] == '/')
        length--;
    if (length == 0 || length >= PATH_MAX)
        return false;
    memcpy(parent, path, length);
    parent[length] = 0;
    return true;
}

/* Makes a folder, with as many missing levels above it, so that it outlives a power cut. */
static bool make_folder(const char *path, int levels)
{
    char parent[PATH_MAX];
    bool has_parent = find_parent(path, parent);
    bool made = mkdir(path, 0700) == 0;
    if (!made && errno == ENOENT && has_parent && levels > 0 && make_folder(parent, levels - 1))
        made = mkdir(path, 0700) == 0;
    if (made)
        return !has_parent || sync_folder(parent);
    return errno == EEXIST; /* another DEL was faster */
}

static bool write_all(int file, const struct frame *request)
{
    size_t done = 0;
    while (done < request->length) {
        ssize_t n = write(file, request->bytes + done, request->length - done);
        if (n > 0)
            done += (size_t)n;
        else if (n < 0 && errno != EINTR)
            return false;
    }
    return true;
}

static bool write_file(int folder, const char *name, const struct frame *request)
{
    int file = openat(folder, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (file < 0)
        return false;
    bool done = write_all(file, request) && sync_fd(file);
    int cause = errno;
    if (close(file) != 0 && done) {
        done = false;
        cause = errno;
    }
    errno = cause;
    return done;
}

bool spool_request(const char *path, const struct frame *request, struct trouble *trouble)
{
    char unfinished[NAME_SIZE] = ".", final[NAME_SIZE];
    size_t length = make_name(final);
    memcpy(unfinished + 1, final, length);
    strcpy(unfinished + 1 + length, ".tmp");
    strcpy(final + length, ".del");

    int folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0 && errno == ENOENT && make_folder(path, 1))
        folder = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (folder < 0)
        return fail(trouble, path);
    bool done = write_file(folder, unfinished, request) && renameat(folder, unfinished, folder, final) == 0;
    if (!done) {
        fail(trouble, path);
        unlinkat(folder, unfinished, 0);
    } else if (!sync_fd(folder)) {
        done = fail(trouble, path); /* the file stays: replaying a DEL twice does no harm */
    }
    close(folder);
    return done;
}
