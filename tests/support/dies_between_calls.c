/* Kill this process just before its n-th system call that changes a file below one directory.

   Preloaded into Python (LD_PRELOAD), so that the calls of native libraries count as well. `arm(n, prefix)` starts to
   count; `counted()` returns how many there were. What only reads is not counted: a kill between two reads leaves
   what a kill before the next change leaves. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static long left = -1, seen = 0;
static char prefix[PATH_MAX];
static void (*ending)(void) = NULL;

void arm(long n, const char *below, void (*act)(void)) {
    strncpy(prefix, below, sizeof prefix - 1);
    ending = act;
    seen = 0;
    left = n;
}
long counted(void) { return seen; }

static int below(const char *path) {
    char buffer[PATH_MAX];
    if (path == NULL) return 0;
    if (path[0] == '/') return strncmp(path, prefix, strlen(prefix)) == 0;
    if (getcwd(buffer, sizeof buffer) == NULL) return 0; /* relative to a directory: of a descriptor or of the process */
    return strncmp(buffer, prefix, strlen(prefix)) == 0;
}
static int descriptor_below(int descriptor) {
    char link[64], target[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t size = readlink(link, target, sizeof target - 1);
    if (size < 0) return 0;
    target[size] = 0;
    return strncmp(target, prefix, strlen(prefix)) == 0;
}
static void count(int hit) {
    if (left < 0 || !hit) return;
    if (seen++ == left) {
        left = -1;
        if (ending) ending(); else kill(getpid(), SIGKILL);
    }
}
static int at(int folder, const char *path) {
    if (left < 0) return 0;
    return path && path[0] != '/' && folder != AT_FDCWD ? descriptor_below(folder) : below(path);
}
#define REAL(name) static __typeof__(name) *real; if (!real) real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)
#define ONE(type, name, parameters, hit, arguments) \
    type name parameters { REAL(name); if (left >= 0) count(hit); return real arguments; }

ONE(ssize_t, write, (int f, const void *b, size_t n), descriptor_below(f), (f, b, n))
ONE(ssize_t, pwrite, (int f, const void *b, size_t n, off_t o), descriptor_below(f), (f, b, n, o))
ONE(ssize_t, pwrite64, (int f, const void *b, size_t n, off64_t o), descriptor_below(f), (f, b, n, o))
ONE(ssize_t, writev, (int f, const struct iovec *v, int n), descriptor_below(f), (f, v, n))
ONE(ssize_t, sendfile, (int o, int i, off_t *p, size_t n), descriptor_below(o), (o, i, p, n))
ONE(ssize_t, sendfile64, (int o, int i, off64_t *p, size_t n), descriptor_below(o), (o, i, p, n))
ONE(ssize_t, copy_file_range, (int i, off64_t *a, int o, off64_t *b, size_t n, unsigned f), descriptor_below(o),
    (i, a, o, b, n, f))
ONE(int, ftruncate, (int f, off_t n), descriptor_below(f), (f, n))
ONE(int, ftruncate64, (int f, off64_t n), descriptor_below(f), (f, n))
ONE(int, fsync, (int f), descriptor_below(f), (f))
ONE(int, fdatasync, (int f), descriptor_below(f), (f))
ONE(int, rename, (const char *a, const char *b), below(a) || below(b), (a, b))
ONE(int, renameat, (int d, const char *a, int e, const char *b), at(d, a) || at(e, b), (d, a, e, b))
ONE(int, unlink, (const char *p), below(p), (p))
ONE(int, unlinkat, (int d, const char *p, int f), at(d, p), (d, p, f))
ONE(int, mkdir, (const char *p, mode_t m), below(p), (p, m))
ONE(int, mkdirat, (int d, const char *p, mode_t m), at(d, p), (d, p, m))
ONE(int, rmdir, (const char *p), below(p), (p))
ONE(int, symlink, (const char *a, const char *b), below(b), (a, b))
ONE(int, link, (const char *a, const char *b), below(b), (a, b))
ONE(int, chmod, (const char *p, mode_t m), below(p), (p, m))

#define CHANGES(flags) ((flags) & (O_CREAT | O_TRUNC))
#define MODE(flags) mode_t mode = 0; if ((flags) & (O_CREAT | O_TMPFILE)) { \
    va_list list; va_start(list, flags); mode = va_arg(list, mode_t); va_end(list); }
#define OPEN(name) int name(const char *p, int flags, ...) { \
    REAL(name); MODE(flags) if (left >= 0 && CHANGES(flags)) count(below(p)); return real(p, flags, mode); }
#define OPENAT(name) int name(int d, const char *p, int flags, ...) { \
    REAL(name); MODE(flags) if (left >= 0 && CHANGES(flags)) count(at(d, p)); return real(d, p, flags, mode); }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
FILE *fopen(const char *p, const char *m) { REAL(fopen); if (left >= 0 && m[0] != 'r') count(below(p)); return real(p, m); }
FILE *fopen64(const char *p, const char *m) { REAL(fopen64); if (left >= 0 && m[0] != 'r') count(below(p)); return real(p, m); }
