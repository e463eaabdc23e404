#include "served.h"

#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

enum { LATELY_SECONDS = 60 };

static const char suffix[] = ".ready";

struct mark {
    char path[sizeof((struct sockaddr_un *)0)->sun_path + sizeof suffix];
};

static bool name_mark(const char *socket_path, struct mark *mark)
{
    size_t length = strlen(socket_path);
    if (length + sizeof suffix > sizeof mark->path)
        return false;
    memcpy(mark->path, socket_path, length);
    memcpy(mark->path + length, suffix, sizeof suffix);
    return true;
}

void note_served(const char *socket_path, bool ready)
{
    struct mark mark;
    if (!name_mark(socket_path, &mark))
        return;
    if (!ready) {
        unlink(mark.path);
        return;
    }
    int file = open(mark.path, O_WRONLY | O_CREAT | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
    if (file < 0)
        return; /* a folder that is full or read-only: then an absent agent counts at once */
    futimens(file, NULL);
    close(file);
}

bool served_lately(const char *socket_path)
{
    struct mark mark;
    struct stat found;
    if (!name_mark(socket_path, &mark) || lstat(mark.path, &found) != 0)
        return false;
    if (!S_ISREG(found.st_mode) || found.st_uid != geteuid())
        return false;
    time_t now = time(NULL);
    return found.st_mtime <= now && now - found.st_mtime < LATELY_SECONDS; /* not so if the clock was set back */
}
