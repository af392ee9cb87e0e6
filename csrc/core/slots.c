/* slots.c -- see slots.h for the files and the protocol. */
#include "slots.h"

#include <errno.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fsio.h"
#include "hash.h"

#define MAGIC "CERSLOTS"
#define VERSION 1
#define PAGE_BYTES 4096

typedef struct record {
    _Atomic uint64_t attempt, position, nbytes;
    _Atomic uint64_t check; /* 0: invalid */
    _Atomic uint64_t hash_low, hash_high;
    _Atomic uint64_t seal; /* of all before; another number: damaged */
    uint64_t unused;
} record;

typedef struct page {
    char magic[8];
    _Atomic uint64_t version; /* written last by whoever makes the page */
    uint64_t unused[6];
    _Atomic uint64_t head;
    uint64_t unused_too[7];
    record records[2];
} page;

_Static_assert(offsetof(page, head) == 64 && offsetof(page, records) == 128 &&
                   sizeof(record) == 64,
               "the layout of the commit page is a file format");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2,
               "the commit page is shared between processes");

struct cer_slots_map {
    atomic_size_t users;
    cer_map file;
    cer_slots_map *older; /* of the same slot, with a view when replaced */
};

struct cer_slots {
    cer_map page_file;
    page *page;
    cer_slots_map *maps[2]; /* NULL until used */
    char *paths[2];
    char *page_path;
    int begun; /* the slot being packed, -1: none */
    uint64_t begun_head;
    cer_slots_info begun_info;
};

/* --- head and records ---------------------------------------------------- */
static uint32_t
fence_of(uint64_t head)
{
    return (uint32_t)(head >> 32);
}

/* 0, 1 or -1: there is none. 3 is no slot: the page is shared, and whoever else
 * has it open may have written anything since it was checked. */
static int
newest_of(uint64_t head)
{
    int slot = (int)(head & 3) - 1;

    return slot < 2 ? slot : -1;
}

/* What a commit makes of head. */
static uint64_t
flipped(uint64_t head, int slot)
{
    uint32_t commits = (uint32_t)head >> 2;

    return (head & 0xffffffff00000000u) | (uint32_t)((commits + 1) << 2) |
           (uint32_t)(slot + 1);
}

static uint64_t
check_of(const cer_slots_info *info, int slot)
{
    uint64_t words[4] = {info->attempt, info->position, info->nbytes,
                         (uint64_t)slot};
    uint64_t hash = cer_hash64(words, sizeof words);

    return hash == 0 ? 1 : hash;
}

static bool
read_record(const cer_slots *slots, int slot, cer_slots_info *out)
{
    const record *r = &slots->page->records[slot];
    uint64_t check = atomic_load_explicit(&r->check, memory_order_acquire);

    out->attempt =
        (uint32_t)atomic_load_explicit(&r->attempt, memory_order_relaxed);
    out->position = atomic_load_explicit(&r->position, memory_order_relaxed);
    out->nbytes =
        (size_t)atomic_load_explicit(&r->nbytes, memory_order_relaxed);
    return check != 0 && check == check_of(out, slot);
}

static void
write_record(cer_slots *slots, int slot, const cer_slots_info *info)
{
    record *r = &slots->page->records[slot];

    atomic_store_explicit(&r->attempt, info->attempt, memory_order_relaxed);
    atomic_store_explicit(&r->position, info->position, memory_order_relaxed);
    atomic_store_explicit(&r->nbytes, info->nbytes, memory_order_relaxed);
    atomic_store_explicit(&r->check, check_of(info, slot),
                          memory_order_release);
}

static uint64_t
seal_of(const cer_slots_info *info, int slot, cer_hash128 hash)
{
    uint64_t words[3] = {check_of(info, slot), hash.low, hash.high};

    return cer_hash64(words, sizeof words);
}

/* Whether the slot has a record, and the seal that belongs to it. */
static bool
read_sealed_record(const cer_slots *slots, int slot, cer_slots_info *out,
                   cer_hash128 *hash)
{
    const record *r = &slots->page->records[slot];
    uint64_t seal = atomic_load_explicit(&r->seal, memory_order_acquire);

    hash->low = atomic_load_explicit(&r->hash_low, memory_order_relaxed);
    hash->high = atomic_load_explicit(&r->hash_high, memory_order_relaxed);
    return read_record(slots, slot, out) && seal == seal_of(out, slot, *hash);
}

static void
write_seal(cer_slots *slots, int slot, const cer_slots_info *info,
           cer_hash128 hash)
{
    record *r = &slots->page->records[slot];

    atomic_store_explicit(&r->hash_low, hash.low, memory_order_relaxed);
    atomic_store_explicit(&r->hash_high, hash.high, memory_order_relaxed);
    atomic_store_explicit(&r->seal, seal_of(info, slot, hash),
                          memory_order_release);
}

/* Nothing of the slot is written before this is: an exchange, as it also keeps
 * what follows from moving up. */
static void
invalidate_record(cer_slots *slots, int slot)
{
    (void)atomic_exchange(&slots->page->records[slot].check, 0);
}

/* The newest slot with a valid record, or -1. Should the newest be damaged, the
 * one before it stands. */
static int
find_committed(const cer_slots *slots, cer_slots_info *out)
{
    uint64_t head = atomic_load(&slots->page->head), seen;
    int slot;

    do { /* again if somebody commits meanwhile */
        seen = head;
        slot = newest_of(head);
        if (slot >= 0 && !read_record(slots, slot, out)) {
            slot = 1 - slot;
            if (!read_record(slots, slot, out))
                slot = -1;
        }
        head = atomic_load(&slots->page->head);
    } while (head != seen);
    return slot;
}

/* --- open and close ------------------------------------------------------ */
static char *
with_suffix(const char *stem, const char *suffix)
{
    size_t stem_len = strlen(stem), suffix_len = strlen(suffix);
    char *path = cer_alloc(stem_len + suffix_len + 1);

    if (path != NULL) {
        memcpy(path, stem, stem_len);
        memcpy(path + stem_len, suffix, suffix_len + 1);
    }
    return path;
}

/* A page of zeros becomes one without commits; any other must be ours. */
static cer_status
check_page(cer_slots *slots, bool create, cer_error *err)
{
    static const char zeros[8];
    page *p = slots->page;
    uint64_t version = atomic_load_explicit(&p->version, memory_order_acquire);

    if (create && version == 0 &&
        (memcmp(p->magic, zeros, 8) == 0 || memcmp(p->magic, MAGIC, 8) == 0)) {
        memcpy(p->magic, MAGIC, 8);
        atomic_store_explicit(&p->version, VERSION, memory_order_release);
        return CER_OK;
    }
    if (memcmp(p->magic, MAGIC, 8) != 0 || version != VERSION ||
        (atomic_load(&p->head) & 3) == 3)
        return cer_fail(err, CER_CORRUPT, "%s is no commit page of slots",
                        slots->page_path);
    return CER_OK;
}

/* Maps the page. One that is cut is not filled up again: what it lacks may have
 * been the newest record. */
static cer_status
map_page(cer_slots *slots, bool create, cer_error *err)
{
    cer_map *file = &slots->page_file;
    cer_status status =
        cer_fsio_map_write(slots->page_path, 0, create, file, err);

    if (status == CER_OK && create && file->size_bytes == 0)
        status = cer_fsio_map_grow(file, PAGE_BYTES, slots->page_path, err);
    if (status == CER_OK && file->size_bytes != PAGE_BYTES)
        status = cer_fail(err, CER_CORRUPT,
                          "%s is no commit page of slots: it has %zu bytes, "
                          "not %d",
                          slots->page_path, file->size_bytes, PAGE_BYTES);
    return status;
}

cer_status
cer_slots_open(const char *stem, bool create, cer_slots **out, cer_error *err)
{
    cer_slots *slots = cer_calloc(1, sizeof *slots);
    cer_status status;

    *out = NULL;
    if (slots == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory opening slots");
    slots->begun = -1;
    slots->page_file = (cer_map)CER_MAP_INIT;
    slots->paths[0] = with_suffix(stem, ".a");
    slots->paths[1] = with_suffix(stem, ".b");
    slots->page_path = with_suffix(stem, ".slots");
    if (slots->paths[0] == NULL || slots->paths[1] == NULL ||
        slots->page_path == NULL) {
        status = cer_fail(err, CER_NOMEM, "out of memory opening slots");
        goto done;
    }
    if ((status = map_page(slots, create, err)) != CER_OK)
        goto done;
    slots->page = (page *)(void *)slots->page_file.data;
    status = check_page(slots, create, err);

done:
    if (status == CER_OK)
        *out = slots;
    else
        cer_slots_close(slots);
    return status;
}

void
cer_slots_map_release(cer_slots_map *map)
{
    if (map != NULL && atomic_fetch_sub(&map->users, 1) == 1) {
        cer_fsio_unmap(&map->file);
        cer_free(map);
    }
}

/* Lets go of the mappings that `map` has replaced; of all, or of those that
 * nobody looks at any more. */
static void
release_older(cer_slots_map *map, bool keep_views)
{
    cer_slots_map **at = map == NULL ? NULL : &map->older;

    while (at != NULL && *at != NULL) {
        cer_slots_map *older = *at;

        if (keep_views && atomic_load(&older->users) > 1) {
            at = &older->older;
        } else {
            *at = older->older;
            cer_slots_map_release(older);
        }
    }
}

void
cer_slots_close(cer_slots *slots)
{
    if (slots == NULL)
        return;
    for (int i = 0; i < 2; i++) {
        release_older(slots->maps[i], false);
        cer_slots_map_release(slots->maps[i]);
        cer_free(slots->paths[i]);
    }
    cer_fsio_unmap(&slots->page_file);
    cer_free(slots->page_path);
    cer_free(slots);
}

/* --- mappings of the slot files ------------------------------------------ */

/* Maps the file as it is now, in place of the old mapping, which stays for
 * those who still look at it. */
static cer_status
map_slot(cer_slots *slots, int slot, bool create, cer_error *err)
{
    cer_slots_map *map = cer_calloc(1, sizeof *map);
    cer_status status;

    if (map == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory opening slots");
    status = cer_fsio_map_write(slots->paths[slot], 0, create, &map->file, err);
    if (status != CER_OK) {
        cer_free(map);
        return status;
    }
    atomic_init(&map->users, 1);
    map->older = slots->maps[slot];
    slots->maps[slot] = map;
    release_older(map, true);
    return CER_OK;
}

static cer_status
file_length(const cer_slots *slots, int slot, size_t *out, cer_error *err)
{
    struct stat info;

    if (fstat(slots->maps[slot]->file.fd, &info) < 0)
        return cer_fail_errno(err, errno, "cannot look at %s",
                              slots->paths[slot]);
    *out = (size_t)info.st_size;
    return CER_OK;
}

/* Makes the file of a slot `nbytes` long and maps all of it. Its pages are kept
 * when its length does not change, which is the rule. Under a view it is not
 * made shorter: reading what was cut off would be a SIGBUS. */
static cer_status
resize_slot(cer_slots *slots, int slot, size_t nbytes, cer_error *err)
{
    cer_status status = CER_OK;
    cer_slots_map *map;
    size_t length = 0;
    bool has_views;

    if (slots->maps[slot] == NULL)
        status = map_slot(slots, slot, true, err);
    if (status == CER_OK)
        status = file_length(slots, slot, &length, err);
    if (status != CER_OK ||
        (length == nbytes && slots->maps[slot]->file.size_bytes == nbytes))
        return status;
    /* Whoever looks at the old mapping keeps it: change a new one. */
    if (atomic_load(&slots->maps[slot]->users) > 1)
        status = map_slot(slots, slot, true, err);
    if (status != CER_OK)
        return status;
    map = slots->maps[slot];
    release_older(map, true);
    has_views = map->older != NULL;
    if (length > nbytes && !has_views)
        status =
            cer_fsio_shorten(map->file.fd, nbytes, slots->paths[slot], err);
    if (status != CER_OK)
        return status;
    return cer_fsio_map_grow(&map->file, nbytes, slots->paths[slot], err);
}

/* --- packing ------------------------------------------------------------- */
static cer_status
fenced(const cer_slots *slots, uint32_t attempt, uint64_t head, cer_error *err)
{
    return cer_fail(
        err, CER_STATE, "attempt %u may not pack into %s: attempt %u has begun",
        (unsigned)attempt, slots->page_path, (unsigned)fence_of(head));
}

void
cer_slots_fence(cer_slots *slots, uint32_t attempt)
{
    uint64_t head = atomic_load(&slots->page->head);

    while (fence_of(head) < attempt &&
           !atomic_compare_exchange_weak(&slots->page->head, &head,
                                         (uint64_t)attempt << 32 |
                                             (head & 0xffffffffu)))
        continue;
}

uint32_t
cer_slots_attempt(const cer_slots *slots)
{
    uint32_t highest = fence_of(atomic_load(&slots->page->head));
    cer_slots_info info;

    for (int slot = 0; slot < 2; slot++)
        if (read_record(slots, slot, &info) && info.attempt > highest)
            highest = info.attempt;
    return highest;
}

bool
cer_slots_committed(const cer_slots *slots, cer_slots_info *out)
{
    return find_committed(slots, out) >= 0;
}

cer_status
cer_slots_begin(cer_slots *slots, uint32_t attempt, size_t nbytes, uint8_t **to,
                cer_error *err)
{
    cer_slots_info newest;
    uint64_t head = atomic_load(&slots->page->head);
    int slot;
    cer_status status;

    slots->begun = -1;
    if (attempt < fence_of(head))
        return fenced(slots, attempt, head, err);
    slot = find_committed(slots, &newest) == 0 ? 1 : 0;
    invalidate_record(slots, slot);
    status = resize_slot(slots, slot, nbytes, err);
    if (status != CER_OK)
        return status;
    slots->begun = slot;
    slots->begun_head = head;
    slots->begun_info = (cer_slots_info){.attempt = attempt, .nbytes = nbytes};
    *to = slots->maps[slot]->file.data;
    return CER_OK;
}

cer_status
cer_slots_commit(cer_slots *slots, uint64_t position, cer_hash128 *hash,
                 cer_error *err)
{
    int slot = slots->begun;
    uint32_t attempt = slots->begun_info.attempt;
    uint64_t head = slots->begun_head;

    slots->begun = -1;
    if (slot < 0)
        return cer_fail(err, CER_STATE, "nothing was packed into %s",
                        slots->page_path);
    slots->begun_info.position = position;
    *hash =
        cer_hash128_of(slots->maps[slot]->file.data, slots->begun_info.nbytes);
    write_seal(slots, slot, &slots->begun_info, *hash);
    write_record(slots, slot, &slots->begun_info);
    while (!atomic_compare_exchange_weak(&slots->page->head, &head,
                                         flipped(head, slot))) {
        bool foreign = (uint32_t)head != (uint32_t)slots->begun_head;

        if (!foreign && fence_of(head) <= attempt)
            continue; /* the fence was raised, but not above us */
        if (!foreign)
            invalidate_record(slots, slot);
        return foreign && fence_of(head) <= attempt
                   ? cer_fail(err, CER_STATE,
                              "another process packed into %s at the same "
                              "time",
                              slots->page_path)
                   : fenced(slots, attempt, head, err);
    }
    return CER_OK;
}

cer_status
cer_slots_revert(cer_slots *slots, uint32_t attempt, uint64_t position,
                 cer_error *err)
{
    uint64_t head = atomic_load(&slots->page->head);
    cer_slots_info info;
    int newest;

    do {
        newest = newest_of(head);
        if (attempt < fence_of(head))
            return fenced(slots, attempt, head, err);
        if (newest >= 0 && read_record(slots, newest, &info) &&
            info.position == position)
            return CER_OK;
        if (newest < 0 || !read_record(slots, 1 - newest, &info) ||
            info.position != position)
            return cer_fail(err, CER_STATE,
                            "%s holds no committed state of position %llu",
                            slots->page_path, (unsigned long long)position);
    } while (!atomic_compare_exchange_weak(&slots->page->head, &head,
                                           flipped(head, 1 - newest)));
    return CER_OK;
}

/* --- looking ------------------------------------------------------------- */
static int
find_position(const cer_slots *slots, uint64_t position, cer_slots_info *out)
{
    int slot = find_committed(slots, out);

    if (slot < 0 || out->position == position)
        return slot;
    slot = 1 - slot;
    return read_record(slots, slot, out) && out->position == position ? slot
                                                                      : -1;
}

/* A file that has been cut off is an error here, not a SIGBUS later. */
static cer_status
map_committed(cer_slots *slots, int slot, size_t nbytes, cer_error *err)
{
    cer_status status = CER_OK;
    size_t length = 0;

    if (slots->maps[slot] == NULL ||
        slots->maps[slot]->file.size_bytes < nbytes)
        status = map_slot(slots, slot, false, err);
    if (status == CER_OK)
        status = file_length(slots, slot, &length, err);
    if (status == CER_OK &&
        (length < nbytes || slots->maps[slot]->file.size_bytes < nbytes))
        status =
            cer_fail(err, CER_CORRUPT, "%s is corrupt: it has been cut off",
                     slots->paths[slot]);
    return status;
}

/* Looks at a slot with a valid record, out->info. */
static cer_status
look_at(cer_slots *slots, int slot, cer_slots_view *out, cer_error *err)
{
    cer_status status = map_committed(slots, slot, out->info.nbytes, err);

    if (status != CER_OK)
        return status;
    out->map = slots->maps[slot];
    out->bytes = out->map->file.data;
    atomic_fetch_add(&out->map->users, 1);
    return CER_OK;
}

cer_status
cer_slots_look(cer_slots *slots, const uint64_t *position, cer_slots_view *out,
               cer_error *err)
{
    int slot = position == NULL ? find_committed(slots, &out->info)
                                : find_position(slots, *position, &out->info);

    if (slot < 0)
        return cer_fail(err, CER_STATE, "%s holds no committed state%s",
                        slots->page_path,
                        position == NULL ? "" : " of that position");
    return look_at(slots, slot, out, err);
}

/* --- seals --------------------------------------------------------------- */
/* Whether the slot's bytes are those that were sealed; then *out is to be
 * released. */
static bool
look_at_sealed(cer_slots *slots, int slot, cer_slots_view *out)
{
    cer_hash128 sealed, hash;

    if (!read_sealed_record(slots, slot, &out->info, &sealed) ||
        look_at(slots, slot, out, NULL) != CER_OK)
        return false;
    hash = cer_hash128_of(out->bytes, out->info.nbytes);
    if (hash.low == sealed.low && hash.high == sealed.high)
        return true;
    cer_slots_map_release(out->map);
    return false;
}

bool
cer_slots_look_sealed(cer_slots *slots, cer_slots_view *out)
{
    cer_slots_info info[2];
    cer_hash128 unused;
    bool sealed[2];
    int first;

    for (int slot = 0; slot < 2; slot++)
        sealed[slot] = read_sealed_record(slots, slot, &info[slot], &unused);
    first = sealed[1] && (!sealed[0] || info[1].position > info[0].position);
    return look_at_sealed(slots, first, out) ||
           look_at_sealed(slots, 1 - first, out);
}

/* --- saving -------------------------------------------------------------- */

cer_status
cer_slots_save(cer_slots *slots, const char *path, cer_error *err)
{
    cer_slots_view view;
    cer_status status = cer_slots_look(slots, NULL, &view, err);
    int fd;

    if (status != CER_OK)
        return status;
    if ((status = cer_fsio_overwrite(path, &fd, err)) != CER_OK)
        goto done;
    status = cer_fsio_write(fd, view.bytes, view.info.nbytes, path, err);
    if (close(fd) < 0 && status == CER_OK && errno != EINTR)
        status = cer_fail_errno(err, errno, "cannot write %s", path);
    if (status != CER_OK)
        (void)unlink(path);

done:
    cer_slots_map_release(view.map);
    return status;
}
