#include "spool.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h> /* renameat */
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { TIME_DIGITS = 20, PID_DIGITS = 10, SUM_DIGITS = 16, ENTRY_LIMIT = 20000 };

static const char suffix[] = ".del";

enum { NAME_SIZE = TIME_DIGITS + 1 + PID_DIGITS + 1 + SUM_DIGITS + sizeof suffix, SUM_AT = TIME_DIGITS + PID_DIGITS + 2 };

static bool fail(struct trouble *trouble, const char *folder)
{
    *trouble = (struct trouble){
        .code = TRY_AGAIN_LATER,
        .msg = "the agent is away and this DEL cannot be kept for it",
        .thing = folder,
        .why = errno == EMLINK ? "holds 20000 files already; has no agent run here for long?" : strerror(errno),
    };
    return false;
}

static char *put_digits(char *at, uint64_t number, unsigned base, size_t width)
{
    for (size_t i = width; i-- > 0; number /= base)
        at[i] = "0123456789abcdef"[number % base];
    return at + width;
}

/* FNV-1a. It need not resist anybody: what has the same sum is compared. */
static uint64_t sum(const struct frame *request)
{
    uint64_t sum = 0xcbf29ce484222325;
    for (size_t i = 0; i < request->length; i++)
        sum = (sum ^ request->bytes[i]) * 0x100000001b3;
    return sum;
}

/* "<nanoseconds>-<pid>-<sum>.del": names of one clock sort by time, those of the same request end alike. */
static void make_name(const struct frame *request, char name[NAME_SIZE])
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    char *at = put_digits(name, (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec, 10, TIME_DIGITS);
    *at++ = '-';
    at = put_digits(at, (uint64_t)getpid(), 10, PID_DIGITS);
    *at++ = '-';
    at = put_digits(at, sum(request), 16, SUM_DIGITS);
    memcpy(at, suffix, sizeof suffix);
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

static bool holds_exactly(int folder, const char *name, const struct frame *request)
{
    int file = openat(folder, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (file < 0)
        return false;
    unsigned char part[4096];
    size_t same = 0;
    for (;;) {
        ssize_t n = read(file, part, sizeof part);
        if (n < 0 && errno == EINTR)
            continue;
        bool fits = n > 0 && (size_t)n <= request->length - same;
        if (!fits || memcmp(part, request->bytes + same, (size_t)n) != 0) {
            close(file);
            return n == 0 && same == request->length;
        }
        same += (size_t)n;
    }
}

enum presence { ABSENT, PRESENT, CROWDED };

/* Looks for the same request in the spool: a runtime repeats a DEL for as long as another plugin fails it. Fills
 * `twin` with the name of its file. */
static enum presence find_request(int folder, const char *name, const struct frame *request, char twin[NAME_SIZE])
{
    int listed = openat(folder, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    DIR *entries = listed < 0 ? NULL : fdopendir(listed);
    if (entries == NULL) {
        if (listed >= 0)
            close(listed);
        return ABSENT; /* to keep it twice does no harm */
    }
    enum presence found = ABSENT;
    int count = 0;
    for (struct dirent *entry; found == ABSENT && (entry = readdir(entries)) != NULL;) {
        if (++count > ENTRY_LIMIT)
            found = CROWDED;
        else if (strlen(entry->d_name) == NAME_SIZE - 1 && strcmp(entry->d_name + SUM_AT, name + SUM_AT) == 0 &&
                 holds_exactly(folder, entry->d_name, request)) {
            memcpy(twin, entry->d_name, NAME_SIZE);
            found = PRESENT;
        }
    }
    closedir(entries);
    return found;
}

/* Opens the spool itself, never what a link there points to. */
static int open_folder(const char *path)
{
    enum { HOW = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC };
    int folder = open(path, HOW);
    if (folder < 0 && errno == ENOENT && make_folder(path, 1))
        folder = open(path, HOW);
    return folder;
}

static bool keep(int folder, const struct frame *request)
{
    char unfinished[1 + NAME_SIZE + 4] = ".", final[NAME_SIZE], twin[NAME_SIZE];
    make_name(request, final);
    switch (find_request(folder, final, request, twin)) {
    case PRESENT:
        /* The agent lets a DEL be that is older than an ADD of the same interface, so the later time counts; on a disk
         * that takes none it is kept all the same. It is synced, too: whoever put it there may not have come so far.
         * One that has gone just now is written anew. */
        if (renameat(folder, twin, folder, final) == 0 || errno != ENOENT)
            return sync_fd(folder);
        break;
    case CROWDED:
        errno = EMLINK;
        return false;
    case ABSENT:
        break;
    }
    strcpy(unfinished + 1, final);
    strcat(unfinished, ".tmp");
    if (write_file(folder, unfinished, request) && renameat(folder, unfinished, folder, final) == 0)
        return sync_fd(folder); /* the file stays even so: replaying a DEL twice does no harm */
    int cause = errno;
    unlinkat(folder, unfinished, 0);
    errno = cause;
    return false;
}

bool spool_request(const char *path, const struct frame *request, struct trouble *trouble)
{
    int folder = open_folder(path);
    if (folder < 0)
        return fail(trouble, path);
    bool done = keep(folder, request) || fail(trouble, path);
    close(folder);
    return done;
}
