/* Loaded before the C library (LD_PRELOAD): no file below the folder STALE_VOLUME can be opened, as on a network disk
 * that has lost its server.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

static int is_stale(const char *path) {
  const char *folder = getenv("STALE_VOLUME");
  return folder && !strncmp(path, folder, strlen(folder));
}

#define OPEN(name)                                                   \
  int name(const char *path, int flags, ...) {                       \
    int (*next)(const char *, int, ...) = dlsym(RTLD_NEXT, #name);   \
    va_list more;                                                    \
    va_start(more, flags);                                           \
    int mode = va_arg(more, int);                                    \
    va_end(more);                                                    \
    if (is_stale(path)) return errno = ESTALE, -1;                   \
    return next(path, flags, mode);                                  \
  }

OPEN(open)
OPEN(open64)
