/* Preloaded, lets the disk of a process fail while a file is there:
   $DISK_FAULTS/<pid>.slow: every fsync and fdatasync takes 300 ms longer, as on a disk that writes back for others.
   $DISK_FAULTS/<pid>.read-only holds a folder: nothing below it can be changed any more, also through open files
   (EROFS), as when a file system remounts itself read-only after an error. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static int flag(const char *kind, char *folder, size_t size) {
    char name[4096];
    const char *below = getenv("DISK_FAULTS");
    if (!below) return 0;
    snprintf(name, sizeof name, "%s/%d.%s", below, (int)getpid(), kind);
    int file = (int)syscall(SYS_openat, AT_FDCWD, name, O_RDONLY | O_CLOEXEC);
    if (file < 0) return 0;
    ssize_t length = folder ? syscall(SYS_read, file, folder, size - 1) : 0;
    syscall(SYS_close, file);
    if (folder) folder[length > 0 ? length : 0] = 0;
    return 1;
}

static int is_below(const char *path) {
    char folder[4096];
    int kept = errno;
    int found = path && flag("read-only", folder, sizeof folder) && *folder && !strncmp(path, folder, strlen(folder));
    errno = found ? EROFS : kept;
    return found;
}

static int is_refused(int file) {
    char link[64], path[4096], folder[4096];
    int kept = errno;
    ssize_t length = -1;
    if (flag("read-only", folder, sizeof folder)) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", file);
        length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    }
    errno = kept;
    if (length < 0) return 0;
    path[length] = 0;
    return is_below(path);
}

static int synced(int file, int (*real)(int)) {
    if (flag("slow", NULL, 0)) nanosleep(&(struct timespec){0, 300000000}, NULL);
    return is_refused(file) ? -1 : real(file);
}

int fsync(int file) { return synced(file, REAL(fsync)); }
int fdatasync(int file) { return synced(file, REAL(fdatasync)); }

ssize_t write(int file, const void *data, size_t size) {
    return is_refused(file) ? -1 : (ssize_t)syscall(SYS_write, file, data, size);
}
ssize_t writev(int file, const struct iovec *data, int count) {
    return is_refused(file) ? -1 : REAL(writev)(file, data, count);
}
ssize_t pwrite(int file, const void *data, size_t size, off_t at) {
    return is_refused(file) ? -1 : (ssize_t)syscall(SYS_pwrite64, file, data, size, at);
}
ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) {
    return is_refused(file) ? -1 : (ssize_t)syscall(SYS_pwrite64, file, data, size, at);
}
int ftruncate(int file, off_t size) { return is_refused(file) ? -1 : REAL(ftruncate)(file, size); }
int ftruncate64(int file, off64_t size) { return is_refused(file) ? -1 : REAL(ftruncate64)(file, size); }
int fallocate(int file, int mode, off_t at, off_t size) {
    return is_refused(file) ? -1 : REAL(fallocate)(file, mode, at, size);
}

static int changes(int flags) { return (flags & O_ACCMODE) != O_RDONLY || flags & (O_CREAT | O_TRUNC); }

#define OPEN(name)                                                                              \
    int name(const char *path, int flags, ...) {                                                \
        va_list more;                                                                           \
        va_start(more, flags);                                                                  \
        int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, int) : 0;                       \
        va_end(more);                                                                           \
        if (changes(flags) && is_below(path)) return -1;                                        \
        return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode);                           \
    }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                                            \
    int name(int at, const char *path, int flags, ...) {                                        \
        va_list more;                                                                           \
        va_start(more, flags);                                                                  \
        int mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(more, int) : 0;                       \
        va_end(more);                                                                           \
        if (changes(flags) && is_below(path)) return -1;                                        \
        return (int)syscall(SYS_openat, at, path, flags, mode);                                 \
    }
OPENAT(openat)
OPENAT(openat64)

int rename(const char *from, const char *to) { return is_below(to) ? -1 : REAL(rename)(from, to); }
int renameat(int a, const char *from, int b, const char *to) {
    return is_below(to) ? -1 : REAL(renameat)(a, from, b, to);
}
int unlink(const char *path) { return is_below(path) ? -1 : REAL(unlink)(path); }
int unlinkat(int at, const char *path, int flags) { return is_below(path) ? -1 : REAL(unlinkat)(at, path, flags); }
int mkdir(const char *path, mode_t mode) { return is_below(path) ? -1 : REAL(mkdir)(path, mode); }
int link(const char *from, const char *to) { return is_below(to) ? -1 : REAL(link)(from, to); }
