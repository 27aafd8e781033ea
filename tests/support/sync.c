/* LD_PRELOAD this library to change what fsync and fdatasync do. Environment variables say how: while the file that
   SYNC_SKIPS names exists, both do nothing and succeed. While the file that SYNC_FAILS names exists, both fail with
   EIO. SYNC_WAITS is the number of microseconds that each sync takes longer, as on a slower disk. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

static int file_exists(const char *variable) {
    const char *path = getenv(variable);
    return path && access(path, F_OK) == 0;
}

static int sync_with(const char *name, int fd) {
    const char *wait = getenv("SYNC_WAITS");
    if (file_exists("SYNC_SKIPS")) return 0;
    if (wait) usleep(strtoul(wait, NULL, 10));
    if (file_exists("SYNC_FAILS")) return errno = EIO, -1;
    return ((int (*)(int))dlsym(RTLD_NEXT, name))(fd);
}

int fsync(int fd) { return sync_with("fsync", fd); }
int fdatasync(int fd) { return sync_with("fdatasync", fd); }
