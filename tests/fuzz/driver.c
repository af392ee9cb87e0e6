/* driver.c -- runs a fuzzer without libFuzzer: every file of a folder
 * unchanged, cut at every byte, and with every bit of its first bytes flipped.
 * Deterministic, and not a substitute for a fuzzer: it finds no new inputs. */
#include <dirent.h>
#include <sys/stat.h>

#include "fuzz.h"

enum { FLIPPED_BYTES = 256 };

static uint8_t *
read_all(const char *path, size_t *size)
{
    FILE *file = fopen(path, "rb");
    struct stat info;
    uint8_t *bytes;

    FUZZ_CHECK(file != NULL && fstat(fileno(file), &info) == 0);
    *size = (size_t)info.st_size;
    bytes = malloc(*size + 1);
    FUZZ_CHECK(bytes != NULL && fread(bytes, 1, *size, file) == *size);
    (void)fclose(file);
    return bytes;
}

static size_t
run_file(const char *path)
{
    size_t size, runs = 0;
    uint8_t *bytes = read_all(path, &size);

    for (size_t cut = 0; cut <= size; cut++, runs++)
        (void)LLVMFuzzerTestOneInput(bytes, cut);
    for (size_t bit = 0; bit < 8 * size && bit < 8 * FLIPPED_BYTES; bit++) {
        bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
        (void)LLVMFuzzerTestOneInput(bytes, size);
        bytes[bit / 8] ^= (uint8_t)(1u << bit % 8);
        runs++;
    }
    free(bytes);
    return runs;
}

int
main(int argc, char **argv)
{
    size_t files = 0, runs = 0;

    for (int i = 1; i < argc; i++) {
        DIR *folder = opendir(argv[i]);
        struct dirent *entry;
        char path[1024];

        FUZZ_CHECK(folder != NULL);
        while ((entry = readdir(folder)) != NULL) {
            if (entry->d_name[0] == '.')
                continue;
            (void)snprintf(path, sizeof path, "%s/%s", argv[i], entry->d_name);
            runs += run_file(path);
            files++;
        }
        (void)closedir(folder);
    }
    FUZZ_CHECK(files > 0);
    printf("%s: %zu files, %zu runs\n", argv[0], files, runs);
    return 0;
}
