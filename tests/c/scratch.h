/* scratch.h -- a temporary folder per test program, removed at its end. */
#ifndef SCRATCH_H
#define SCRATCH_H

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char scratch_folder[256];

/* Removes the folder and its files; folders in it must be empty. */
static inline void
scratch_remove(void)
{
    DIR *folder = opendir(scratch_folder);
    struct dirent *entry;
    char path[600];

    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        (void)snprintf(path, sizeof path, "%s/%s", scratch_folder,
                       entry->d_name);
        if (unlink(path) < 0)
            (void)rmdir(path);
    }
    if (folder != NULL)
        (void)closedir(folder);
    (void)rmdir(scratch_folder);
}

/* The path of a name in the folder, in one of eight buffers used in turn. */
static inline const char *
scratch(const char *name)
{
    static char paths[8][512];
    static int turn;
    const char *base = getenv("TMPDIR");

    if (scratch_folder[0] == '\0') {
        (void)snprintf(scratch_folder, sizeof scratch_folder,
                       "%s/cerebro-test-XXXXXX", base == NULL ? "/tmp" : base);
        if (mkdtemp(scratch_folder) == NULL)
            abort();
        (void)atexit(scratch_remove);
    }
    turn = (turn + 1) % 8;
    (void)snprintf(paths[turn], sizeof paths[turn], "%s/%s", scratch_folder,
                   name);
    return paths[turn];
}

static inline void
scratch_write(const char *name, const void *data, size_t len_bytes)
{
    FILE *file = fopen(scratch(name), "wb");

    if (file == NULL || fwrite(data, 1, len_bytes, file) != len_bytes ||
        fclose(file) != 0)
        abort();
}

/* Reads at most `room` bytes; returns their number, or -1 without the file. */
static inline long
scratch_read(const char *name, void *data, size_t room)
{
    FILE *file = fopen(scratch(name), "rb");
    size_t n;

    if (file == NULL)
        return -1;
    n = fread(data, 1, room, file);
    (void)fclose(file);
    return (long)n;
}

/* Counts the folder's files. */
static inline int
scratch_files(void)
{
    DIR *folder = opendir(scratch_folder);
    struct dirent *entry;
    int n = 0;

    while (folder != NULL && (entry = readdir(folder)) != NULL)
        n += entry->d_name[0] != '.';
    if (folder != NULL)
        (void)closedir(folder);
    return n;
}

/* Counts the open descriptors, to find leaks. */
static inline int
scratch_descriptors(void)
{
    int n = 0;

    for (int fd = 0; fd < 256; fd++) {
        struct stat info;

        n += fstat(fd, &info) == 0;
    }
    return n;
}

#endif
