/* fuzz_slots.c -- any bytes as the three files of a trial's slots: they are
 * checked, opened, read and packed into. Whatever they contained, a later
 * commit must be read back. */
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fuzz.h"
#include "hash.h"
#include "slots.h"

enum {
    SIGN_A = 1,
    SIGN_B = 2,
    CREATE = 4,
    CUT_PAGE = 8,
    SEAL_A = 16,
    SEAL_B = 32,
    PAGE_BYTES = 4096
};

static char folder[256], stem[300];
static const char *const suffixes[3] = {".slots", ".a", ".b"};

static const char *
path_of(int file)
{
    static char path[320];

    (void)snprintf(path, sizeof path, "%s%s", stem, suffixes[file]);
    return path;
}

static void
remove_folder(void)
{
    for (int i = 0; i < 3; i++)
        (void)unlink(path_of(i));
    (void)rmdir(folder);
}

static void
make_folder(void)
{
    const char *base = getenv("TMPDIR");

    if (folder[0] != '\0')
        return;
    (void)snprintf(folder, sizeof folder, "%s/cerebro-fuzz-XXXXXX",
                   base == NULL ? "/tmp" : base);
    FUZZ_CHECK(mkdtemp(folder) != NULL);
    (void)snprintf(stem, sizeof stem, "%s/7", folder);
    (void)atexit(remove_folder);
}

/* Writes a file with these bytes; no file if there are none. */
static void
write_file(int file, const uint8_t *data, size_t size)
{
    int fd;

    (void)unlink(path_of(file));
    if (size == 0)
        return;
    fd = open(path_of(file), O_WRONLY | O_CREAT | O_EXCL, 0600);
    FUZZ_CHECK(fd >= 0 && write(fd, data, size) == (ssize_t)size);
    (void)close(fd);
}

/* Sets a record's check word, because a fuzzer cannot guess a hash. */
static void
sign(uint8_t *page, int slot)
{
    uint8_t *record = page + 128 + 64 * slot;
    uint64_t words[4], hash;

    memset(record + 4, 0, 4); /* attempts have 32 bits */
    memcpy(words, record, 24);
    words[3] = (uint64_t)slot;
    hash = cer_hash64(words, sizeof words);
    memcpy(record + 24, &hash, 8);
}

/* Sets its seal for the slot's bytes. */
static void
seal(uint8_t *page, int slot, const uint8_t *state, size_t nbytes)
{
    uint8_t *record = page + 128 + 64 * slot;
    cer_hash128 hash = cer_hash128_of(state, nbytes);
    uint64_t words[3] = {0, hash.low, hash.high}, check;

    memcpy(words, record + 24, 8);
    check = cer_hash64(words, sizeof words);
    memcpy(record + 32, words + 1, 16);
    memcpy(record + 48, &check, 8);
}

/* flags, length of the page in 16ths, length of a; page (zeros follow), a, b */
static void
write_files(const uint8_t *data, size_t size)
{
    uint8_t page[PAGE_BYTES] = {0};
    uint8_t flags = size > 0 ? data[0] : 0;
    size_t given = size > 1 ? data[1] * (size_t)16 : 0;
    size_t a = size > 2 ? data[2] : 0;
    size_t left = size > 3 ? size - 3 : 0;
    const uint8_t *at = data + (size > 3 ? 3 : size);

    given = given < left ? given : left;
    memcpy(page, at, given);
    left -= given;
    at += given;
    a = a < left ? a : left;
    if ((flags & SIGN_A) != 0)
        sign(page, 0);
    if ((flags & SIGN_B) != 0)
        sign(page, 1);
    if ((flags & SEAL_A) != 0)
        seal(page, 0, at, a);
    if ((flags & SEAL_B) != 0)
        seal(page, 1, at + a, left - a);
    write_file(0, page, (flags & CUT_PAGE) != 0 ? given : PAGE_BYTES);
    write_file(1, at, a);
    write_file(2, at + a, left - a);
}

static void
look(cer_slots *slots, const uint64_t *position)
{
    cer_slots_view view;
    cer_error err = {0};
    cer_status status = cer_slots_look(slots, position, &view, &err);

    if (status != CER_OK) {
        FUZZ_CHECK(status == CER_CORRUPT || status == CER_STATE ||
                   status == CER_IO);
        fuzz_check_error(&err, folder);
        return;
    }
    FUZZ_CHECK(position == NULL || view.info.position == *position);
    (void)cer_hash128_of(view.bytes, view.info.nbytes); /* reads all of it */
    cer_slots_map_release(view.map);
}

/* Packs a few bytes; if allowed, they must be read back. */
static void
pack(cer_slots *slots, uint32_t attempt, uint64_t position)
{
    static const char state[] = "a state";
    cer_slots_info info;
    cer_slots_view view;
    cer_hash128 hash;
    uint8_t *to = NULL;
    cer_error err = {0};

    if (cer_slots_begin(slots, attempt, sizeof state, &to, &err) != CER_OK) {
        fuzz_check_error(&err, folder);
        return;
    }
    memcpy(to, state, sizeof state);
    if (cer_slots_commit(slots, position, &hash, &err) != CER_OK) {
        fuzz_check_error(&err, folder);
        return;
    }
    FUZZ_CHECK(cer_slots_committed(slots, &info));
    FUZZ_CHECK(info.position == position && info.attempt == attempt);
    FUZZ_CHECK(cer_slots_look(slots, NULL, &view, NULL) == CER_OK);
    FUZZ_CHECK(view.info.nbytes == sizeof state &&
               memcmp(view.bytes, state, sizeof state) == 0);
    cer_slots_map_release(view.map);
    /* This one is found, or a later one. */
    FUZZ_CHECK(cer_slots_look_sealed(slots, &view));
    FUZZ_CHECK(view.info.position >= position);
    cer_slots_map_release(view.map);
}

/* A sealed state has that hash and can also be found by its position. */
static void
look_sealed(cer_slots *slots)
{
    cer_slots_view view;

    if (!cer_slots_look_sealed(slots, &view))
        return;
    (void)cer_hash128_of(view.bytes, view.info.nbytes);
    FUZZ_CHECK(view.info.attempt <= cer_slots_attempt(slots));
    cer_slots_map_release(view.map);
}

static void
use(cer_slots *slots)
{
    cer_slots_info info = {0};
    uint64_t position = 1;

    look_sealed(slots);
    if (cer_slots_committed(slots, &info))
        position = info.position;
    look(slots, NULL);
    look(slots, &position);
    position--;
    look(slots, &position);
    pack(slots, info.attempt, info.position + 1);
    cer_slots_fence(slots, 3);
    pack(slots, 2, info.position + 2);
    pack(slots, UINT32_MAX, info.position + 3);
    look(slots, NULL);
}

int
LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    cer_slots *slots = NULL;
    cer_slots_damage damage;
    cer_error err = {0};
    bool create = size > 0 && (data[0] & CREATE) != 0;
    cer_status status;

    make_folder();
    write_files(data, size);
    FUZZ_CHECK(cer_slots_check(stem, &damage, NULL) == CER_OK);
    status = cer_slots_open(stem, create, &slots, &err);
    if (status == CER_OK) {
        use(slots);
    } else {
        FUZZ_CHECK(status == CER_CORRUPT ||
                   (status == CER_IO && err.os_errno != 0));
        FUZZ_CHECK(slots == NULL);
        fuzz_check_error(&err, path_of(0));
    }
    cer_slots_close(slots);
    return 0;
}
