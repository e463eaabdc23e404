#include "namespace.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <linux/nsfs.h>
#include <sched.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/vfs.h>
#include <unistd.h>

/* Says what is wrong with an open file as a network namespace, or NULL. A namespace that was unmounted leaves the
 * empty file it was mounted on, and setns(2) would tell the agent no more than EINVAL. */
static const char *find_fault(int fd)
{
    struct statfs filesystem;
    if (fstatfs(fd, &filesystem) != 0)
        return strerror(errno);
    if ((unsigned long)filesystem.f_type != NSFS_MAGIC)
        return "is no namespace (its mount may be gone)";
    int type = ioctl(fd, NS_GET_NSTYPE); /* since Linux 4.11; without it setns(2) will tell */
    if (type >= 0 && type != CLONE_NEWNET)
        return "is a namespace of another kind";
    return NULL;
}

int open_namespace(const char *path, const char **why)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY); /* non-blocking: the path may be a pipe */
    if (fd < 0) {
        *why = strerror(errno);
        return -1;
    }
    *why = find_fault(fd);
    if (*why == NULL)
        return fd;
    close(fd);
    return -1;
}
