/* Lets fsync and fdatasync fail while the file SYNC_FAILS is there, do nothing while SYNC_SKIPS is,
   or take 5 ms more, as on the volumes of a cloud, while SYNC_WAITS is: LD_PRELOAD this. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

static int is_there(const char *variable) {
    const char *path = getenv(variable);
    return path && access(path, F_OK) == 0;
}

static int try_to(const char *name, int fd) {
    if (is_there("SYNC_SKIPS")) return 0;
    if (is_there("SYNC_WAITS")) usleep(5000);
    if (is_there("SYNC_FAILS")) return errno = EIO, -1;
    return ((int (*)(int))dlsym(RTLD_NEXT, name))(fd);
}

int fsync(int fd) { return try_to("fsync", fd); }
int fdatasync(int fd) { return try_to("fdatasync", fd); }
