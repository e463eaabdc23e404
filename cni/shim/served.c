#include "served.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { LATELY_SECONDS = 60 };

static const char ready_suffix[] = ".ready";

bool name_beside(const char *socket_path, const char *suffix, char path[BESIDE_SIZE])
{
    size_t length = strlen(socket_path), more = strlen(suffix) + 1;
    if (length + more > BESIDE_SIZE)
        return false;
    memcpy(path, socket_path, length);
    memcpy(path + length, suffix, more);
    return true;
}

void note_served(const char *socket_path, bool ready)
{
    char mark[BESIDE_SIZE];
    if (!name_beside(socket_path, ready_suffix, mark))
        return;
    if (!ready) {
        unlink(mark);
        return;
    }
    int file = open(mark, O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
    if (file < 0)
        return; /* a folder that is full or read-only: then an absent agent counts at once */
    futimens(file, NULL);
    close(file);
}

bool served_lately(const char *socket_path)
{
    char mark[BESIDE_SIZE];
    struct stat found;
    if (!name_beside(socket_path, ready_suffix, mark) || lstat(mark, &found) != 0)
        return false;
    if (!S_ISREG(found.st_mode) || found.st_uid != geteuid())
        return false;
    time_t now = time(NULL);
    return found.st_mtime <= now && now - found.st_mtime < LATELY_SECONDS; /* not so if the clock was set back */
}
