/* Preloaded (LD_PRELOAD): while there is a symbolic link REFUSED_SWITCH, writes and syncs of files below the folder
 * REFUSED_FOLDER fail with the errno that the link names ("5" is EIO). For disks that no mount can make.
 * Where the link names "hold", those of a checkpoint that is being written wait until the link is gone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

static int refused(int descriptor)
{
    const char *folder = getenv("REFUSED_FOLDER"), *link = getenv("REFUSED_SWITCH");
    char number[16], file[64], path[4096];
    if (!folder || !link)
        return 0;
    ssize_t length = readlink(link, number, sizeof number - 1);
    if (length < 0)
        return 0;
    number[length] = 0;
    snprintf(file, sizeof file, "/proc/self/fd/%d", descriptor);
    length = readlink(file, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    if (strcmp(number, "hold") == 0) {
        while (strstr(path, "/.staging-") && readlink(link, number, sizeof number - 1) >= 0)
            usleep(10000);
        return 0;
    }
    size_t all = strlen(folder);
    return strncmp(path, folder, all) == 0 && path[all] == '/' ? atoi(number) : 0;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define REFUSE(descriptor)                    \
    do {                                      \
        int kept = errno;                     \
        int code = refused(descriptor);       \
        errno = code ? code : kept;           \
        if (code)                             \
            return -1;                        \
    } while (0)

ssize_t write(int descriptor, const void *bytes, size_t count)
{
    REFUSE(descriptor);
    return REAL(write)(descriptor, bytes, count);
}

ssize_t writev(int descriptor, const struct iovec *parts, int count)
{
    REFUSE(descriptor);
    return REAL(writev)(descriptor, parts, count);
}

ssize_t pwrite64(int descriptor, const void *bytes, size_t count, off64_t offset)
{
    REFUSE(descriptor);
    return REAL(pwrite64)(descriptor, bytes, count, offset);
}

int fsync(int descriptor)
{
    REFUSE(descriptor);
    return REAL(fsync)(descriptor);
}

int fdatasync(int descriptor)
{
    REFUSE(descriptor);
    return REAL(fdatasync)(descriptor);
}
