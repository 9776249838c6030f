/* Preloaded, makes every fsync and fdatasync of a process take 300 ms longer while the file $SLOW_DISK/<pid> is there:
   a disk that writes back what others wrote. What the real disk takes beyond 20 ms is written to $SLOW_DISK/stalls,
   milliseconds a line. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static int slowly(const char *name, int file) {
    char flag[4096];
    const char *folder = getenv("SLOW_DISK");
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    if (folder) {
        snprintf(flag, sizeof flag, "%s/%d", folder, (int)getpid());
        if (access(flag, F_OK) == 0) nanosleep(&(struct timespec){0, 300000000}, NULL);
    }
    struct timespec began, ended;
    clock_gettime(CLOCK_MONOTONIC, &began);
    int result = real(file);
    clock_gettime(CLOCK_MONOTONIC, &ended);
    long ms = (ended.tv_sec - began.tv_sec) * 1000 + (ended.tv_nsec - began.tv_nsec) / 1000000;
    if (folder && ms > 20) {
        snprintf(flag, sizeof flag, "%s/stalls", folder);
        FILE *stalls = fopen(flag, "a");
        if (stalls) {
            fprintf(stalls, "%ld\n", ms);
            fclose(stalls);
        }
    }
    return result;
}

int fsync(int file) { return slowly("fsync", file); }
int fdatasync(int file) { return slowly("fdatasync", file); }
