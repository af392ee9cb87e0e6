/* slots.c -- see slots.h for the files and the protocol. */
#include "slots.h"

#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "fsio.h"
#include "hash.h"

#define MAGIC "CERSLOTS"
#define VERSION 2
#define PAGE_BYTES 4096
#define PLACES 31 /* records that a slot uses in turn */

typedef struct record {
    _Atomic uint64_t attempt, position, nbytes;
    _Atomic uint64_t check; /* 0: invalid */
    _Atomic uint64_t hash_low, hash_high;
    _Atomic uint64_t seal; /* hash of the above; any other: damaged */
    _Atomic uint64_t file; /* number of the slot's file */
} record;

typedef struct page {
    char magic[8];
    _Atomic uint64_t version; /* written last when the page is made */
    _Atomic uint64_t files;   /* count of the numbers given to files */
    uint64_t unused[5];
    _Atomic uint64_t head;
    uint64_t unused_too[7];
    record records[PLACES][2];
} page;

_Static_assert(offsetof(page, head) == 64 && offsetof(page, records) == 128 &&
                   sizeof(record) == 64 && sizeof(page) == PAGE_BYTES,
               "the layout of the commit page is a file format");
_Static_assert(ATOMIC_LLONG_LOCK_FREE == 2,
               "the commit page is shared between processes");

struct cer_slots_map {
    atomic_size_t users;
    cer_map file;
    uint64_t number;      /* number of the file; a new file has its name if the
                             record's number differs */
    cer_slots_map *older; /* of the same slot, replaced while viewed */
};

struct cer_slots {
    cer_map page_file;
    page *page;
    cer_slots_map *maps[2]; /* NULL until used */
    char *paths[2];
    char *page_path;
    int begun; /* the slot being packed, -1: none */
    cer_slots_info begun_info;
    uint32_t claim; /* the low half of head after our last begin */
};

/* --- head and records ---------------------------------------------------- */
static uint32_t
fence_of(uint64_t head)
{
    return (uint32_t)(head >> 32);
}

/* 0, 1, or -1 for none. 3 is not a slot: the page is shared, and a different
 * process may have written anything since it was checked. */
static int
newest_of(uint64_t head)
{
    int slot = (int)(head & 3) - 1;

    return slot < 2 ? slot : -1;
}

/* Bits of the low half of head; see slots.h. */
#define PACKING ((uint64_t)1 << 2)
#define PLACE_BITS 5
#define PLACE_MASK ((uint64_t)31)
#define COUNT ((uint64_t)1 << 13) /* one change */

static unsigned
place_shift(int slot)
{
    return slot == 0 ? 3 : 3 + PLACE_BITS;
}

/* The place of the slot's valid record. An impossible number is damage; any
 * record is then fine, because each is checked. */
static size_t
place_of(uint64_t head, int slot)
{
    return (size_t)(head >> place_shift(slot) & PLACE_MASK) % PLACES;
}

/* The slot into which a pack goes under this head. */
static int
packed_slot(uint64_t head)
{
    return newest_of(head) == 0 ? 1 : 0;
}

/* Head with a new newest slot, or -1 for none, counted as a change. */
static uint64_t
with_newest(uint64_t head, int newest, bool packing)
{
    uint32_t low = (uint32_t)((head & ~(PACKING | 3)) + COUNT);

    return (head & 0xffffffff00000000u) | low | (packing ? PACKING : 0) |
           (uint64_t)(newest + 1);
}

static uint64_t
with_next_place(uint64_t head, int slot)
{
    uint64_t next = (place_of(head, slot) + 1) % PLACES;

    head &= ~(PLACE_MASK << place_shift(slot));
    return head | next << place_shift(slot);
}

/* The valid record of a slot. */
static record *
record_at(const cer_slots *slots, uint64_t head, int slot)
{
    return &slots->page->records[place_of(head, slot)][slot];
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
read_record(const cer_slots *slots, uint64_t head, int slot,
            cer_slots_info *out)
{
    const record *r = record_at(slots, head, slot);
    uint64_t check = atomic_load_explicit(&r->check, memory_order_acquire);
    uint64_t attempt = atomic_load_explicit(&r->attempt, memory_order_relaxed);

    out->attempt = (uint32_t)attempt;
    out->position = atomic_load_explicit(&r->position, memory_order_relaxed);
    out->nbytes =
        (size_t)atomic_load_explicit(&r->nbytes, memory_order_relaxed);
    return attempt <= UINT32_MAX && check != 0 && check == check_of(out, slot);
}

/* Whether the slot holds a committed state: the older slot does while no pack
 * into it is pending. */
static bool
read_committed(const cer_slots *slots, uint64_t head, int slot,
               cer_slots_info *out)
{
    if ((head & PACKING) != 0 && slot == packed_slot(head))
        return false;
    return read_record(slots, head, slot, out);
}

static void
write_record(record *r, int slot, const cer_slots_info *info)
{
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

/* Whether the slot has a committed record with its matching seal. */
static bool
read_sealed_record(const cer_slots *slots, uint64_t head, int slot,
                   cer_slots_info *out, cer_hash128 *hash)
{
    const record *r = record_at(slots, head, slot);
    uint64_t seal = atomic_load_explicit(&r->seal, memory_order_acquire);

    hash->low = atomic_load_explicit(&r->hash_low, memory_order_relaxed);
    hash->high = atomic_load_explicit(&r->hash_high, memory_order_relaxed);
    return read_committed(slots, head, slot, out) &&
           seal == seal_of(out, slot, *hash);
}

static void
write_seal(record *r, int slot, const cer_slots_info *info, cer_hash128 hash)
{
    atomic_store_explicit(&r->hash_low, hash.low, memory_order_relaxed);
    atomic_store_explicit(&r->hash_high, hash.high, memory_order_relaxed);
    atomic_store_explicit(&r->seal, seal_of(info, slot, hash),
                          memory_order_release);
}

/* The newest slot with a valid record, or -1. If the newest is damaged, it is
 * the one before. */
static int
committed_slot(const cer_slots *slots, uint64_t head, cer_slots_info *out)
{
    int slot = newest_of(head);

    if (slot < 0 || read_committed(slots, head, slot, out))
        return slot;
    return read_committed(slots, head, 1 - slot, out) ? 1 - slot : -1;
}

/* Whether reads since `head` are inconsistent: its low half changes with every
 * begin, commit and revert. */
static bool
has_changed(const cer_slots *slots, uint64_t head)
{
    return (uint32_t)atomic_load(&slots->page->head) != (uint32_t)head;
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

static const char *const suffixes[2] = {".a", ".b"};
static const char page_suffix[] = ".slots";

static cer_status
name_files(cer_slots *slots, const char *stem, cer_error *err)
{
    slots->paths[0] = with_suffix(stem, suffixes[0]);
    slots->paths[1] = with_suffix(stem, suffixes[1]);
    slots->page_path = with_suffix(stem, page_suffix);
    if (slots->paths[0] == NULL || slots->paths[1] == NULL ||
        slots->page_path == NULL)
        return cer_fail(err, CER_NOMEM, "out of memory opening slots");
    return CER_OK;
}

static void
free_names(cer_slots *slots)
{
    cer_free(slots->paths[0]);
    cer_free(slots->paths[1]);
    cer_free(slots->page_path);
}

/* Initializes a page of zeros; any other page must be a commit page. `name` is
 * the page in messages. */
static cer_status
check_page(cer_slots *slots, bool create, const char *name, cer_error *err)
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
    if (memcmp(p->magic, MAGIC, 8) != 0 || version == 0 ||
        (version == VERSION && (atomic_load(&p->head) & 3) == 3))
        return cer_fail(err, CER_CORRUPT, "%s is not a commit page of slots",
                        name);
    if (version != VERSION)
        return cer_fail(err, CER_CORRUPT,
                        "%s has slot version %" PRIu64
                        ", of %s Cerebro, and this one reads only version %d: "
                        "%s",
                        name, version,
                        version < VERSION ? "an earlier" : "a newer", VERSION,
                        version < VERSION ? "repeat the search in a new folder"
                                          : "update Cerebro");
    return CER_OK;
}

/* Maps the page. A truncated page is not extended: its missing part may have
 * held the newest record. */
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
                          "%s is not a commit page of slots: it has %zu bytes, "
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
    if ((status = name_files(slots, stem, err)) != CER_OK ||
        (status = map_page(slots, create, err)) != CER_OK)
        goto done;
    slots->page = (page *)(void *)slots->page_file.data;
    status = check_page(slots, create, slots->page_path, err);

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

/* Releases the mappings that `map` has replaced: all, or those without
 * views. */
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
    }
    cer_fsio_unmap(&slots->page_file);
    free_names(slots);
    cer_free(slots);
}

/* --- mappings of the slot files ------------------------------------------ */

/* Maps the current file in place of the old mapping, which stays for its
 * views. */
static cer_status
map_slot(cer_slots *slots, int slot, uint64_t number, bool create,
         cer_error *err)
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
    map->number = number;
    map->older = slots->maps[slot];
    slots->maps[slot] = map;
    release_older(map, true);
    return CER_OK;
}

/* Maps the file of this number unless it is mapped already. */
static cer_status
map_file(cer_slots *slots, int slot, uint64_t number, bool create,
         cer_error *err)
{
    const cer_slots_map *map = slots->maps[slot];

    return map != NULL && map->number == number
               ? CER_OK
               : map_slot(slots, slot, number, create, err);
}

static cer_status
file_length(const cer_slots *slots, int slot, size_t *out, cer_error *err)
{
    struct stat info;

    if (fstat(slots->maps[slot]->file.fd, &info) < 0)
        return cer_fail_errno(err, errno, "cannot inspect %s",
                              slots->paths[slot]);
    *out = (size_t)info.st_size;
    return CER_OK;
}

/* --- packing ------------------------------------------------------------- */
static cer_status
fenced(const cer_slots *slots, uint32_t attempt, uint64_t head, cer_error *err)
{
    return cer_fail(
        err, CER_STATE, "attempt %u may not pack into %s: attempt %u has begun",
        (unsigned)attempt, slots->page_path, (unsigned)fence_of(head));
}

/* Checks that our last pack may continue under this head: since then, no
 * process raised the fence above it, began, committed or reverted. */
static cer_status
check_claim(const cer_slots *slots, uint64_t head, cer_error *err)
{
    if (slots->begun_info.attempt < fence_of(head))
        return fenced(slots, slots->begun_info.attempt, head, err);
    if ((uint32_t)head != slots->claim)
        return cer_fail(err, CER_STATE,
                        "another process packed into %s at the same time",
                        slots->page_path);
    return CER_OK;
}

/* Claims the slot that is not the newest: its record and file are then ours
 * until the next begin. A different process may still write to its unfinished
 * pack: *anew then requests the next record and a new file, and leaves the old
 * ones to that process. */
static cer_status
claim_slot(cer_slots *slots, uint32_t attempt, int *slot, bool *anew,
           cer_error *err)
{
    uint64_t head = atomic_load(&slots->page->head), claimed;
    cer_slots_info unused;

    do {
        bool packing = (head & PACKING) != 0;
        int newest =
            packing ? newest_of(head) : committed_slot(slots, head, &unused);

        if (attempt < fence_of(head))
            return fenced(slots, attempt, head, err);
        *anew = packing && (uint32_t)head != slots->claim;
        claimed = with_newest(head, newest, true);
        *slot = packed_slot(claimed);
        if (*anew)
            claimed = with_next_place(claimed, *slot);
    } while (!atomic_compare_exchange_weak(&slots->page->head, &head, claimed));
    slots->claim = (uint32_t)claimed;
    return CER_OK;
}

/* Replaces the slot's file by a new, empty one. The old one stays for processes
 * that have it mapped, for views or late writes. */
static cer_status
replace_file(cer_slots *slots, int slot, record *r, cer_error *err)
{
    uint64_t number;
    cer_status status;
    struct stat page_file;

    if (fstat(slots->page_file.fd, &page_file) < 0)
        return cer_fail_errno(err, errno, "cannot inspect %s",
                              slots->page_path);
    if (page_file.st_nlink == 0) /* a new page may have the names now */
        return cer_fail(err, CER_STATE, "%s has been removed",
                        slots->page_path);
    number = atomic_fetch_add(&slots->page->files, 1) + 1;
    /* As late as possible: if we are stopped between this and unlink, and
     * presumed dead, we remove a different process's file. */
    status = check_claim(slots, atomic_load(&slots->page->head), err);
    if (status != CER_OK)
        return status;
    atomic_store(&r->file, number); /* others have mapped the old one */
    if (unlink(slots->paths[slot]) < 0 && errno != ENOENT)
        return cer_fail_errno(err, errno, "cannot replace %s",
                              slots->paths[slot]);
    return map_slot(slots, slot, number, true, err);
}

/* Makes the file of a slot `nbytes` long and maps all of it. If its length does
 * not change, which is usual, its pages are kept. It is never truncated:
 * reading the lost part would be a SIGBUS in any process that has a view. */
static cer_status
resize_slot(cer_slots *slots, int slot, record *r, size_t nbytes, bool anew,
            cer_error *err)
{
    size_t length = 0;
    cer_status status = map_file(slots, slot, atomic_load(&r->file), true, err);

    if (status == CER_OK)
        status = file_length(slots, slot, &length, err);
    if (status == CER_OK && (anew || length > nbytes))
        status = replace_file(slots, slot, r, err);
    /* A mapping with views is replaced, not moved. */
    else if (status == CER_OK && slots->maps[slot]->file.size_bytes != nbytes &&
             atomic_load(&slots->maps[slot]->users) > 1)
        status = map_slot(slots, slot, slots->maps[slot]->number, true, err);
    /* A process that takes the slot from us makes a new file, but only after it
     * has changed head. Head was unchanged after our file was opened: the file
     * is ours, and may be grown and written to, however late. */
    if (status == CER_OK)
        status = check_claim(slots, atomic_load(&slots->page->head), err);
    if (status != CER_OK)
        return status;
    release_older(slots->maps[slot], true);
    return cer_fsio_map_grow(&slots->maps[slot]->file, nbytes,
                             slots->paths[slot], err);
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
    uint64_t head = atomic_load(&slots->page->head);
    uint32_t highest = fence_of(head);
    cer_slots_info info;

    for (int slot = 0; slot < 2; slot++)
        if (read_record(slots, head, slot, &info) && info.attempt > highest)
            highest = info.attempt;
    return highest;
}

bool
cer_slots_committed(const cer_slots *slots, cer_slots_info *out)
{
    uint64_t head;
    int slot;

    do {
        head = atomic_load(&slots->page->head);
        slot = committed_slot(slots, head, out);
    } while (has_changed(slots, head));
    return slot >= 0;
}

cer_status
cer_slots_begin(cer_slots *slots, uint32_t attempt, size_t nbytes, uint8_t **to,
                cer_error *err)
{
    cer_status status;
    record *r;
    bool anew = false;
    int slot = 0;

    slots->begun = -1;
    status = claim_slot(slots, attempt, &slot, &anew, err);
    if (status != CER_OK)
        return status;
    slots->begun_info = (cer_slots_info){.attempt = attempt, .nbytes = nbytes};
    r = record_at(slots, slots->claim, slot);
    (void)atomic_exchange(&r->check, 0);
    status = resize_slot(slots, slot, r, nbytes, anew, err);
    if (status != CER_OK)
        return status;
    slots->begun = slot;
    *to = slots->maps[slot]->file.data;
    return CER_OK;
}

cer_status
cer_slots_commit(cer_slots *slots, uint64_t position, cer_hash128 *hash,
                 cer_error *err)
{
    int slot = slots->begun;
    cer_status status;
    uint64_t head;
    record *r;

    slots->begun = -1;
    if (slot < 0)
        return cer_fail(err, CER_STATE, "nothing was packed into %s",
                        slots->page_path);
    /* Without the claim, the mapping may be of another process's file, which
     * may be shorter. */
    status = check_claim(slots, atomic_load(&slots->page->head), err);
    if (status != CER_OK)
        return status;
    slots->begun_info.position = position;
    *hash =
        cer_hash128_of(slots->maps[slot]->file.data, slots->begun_info.nbytes);
    /* The record is ours even if the slot no longer is: it is hidden until head
     * names it, and a process that took the slot uses the next one. */
    r = record_at(slots, slots->claim, slot);
    head = atomic_load(&slots->page->head);
    status = check_claim(slots, head, err);
    if (status != CER_OK)
        return status;
    write_seal(r, slot, &slots->begun_info, *hash);
    write_record(r, slot, &slots->begun_info);
    while (!atomic_compare_exchange_weak(&slots->page->head, &head,
                                         with_newest(head, slot, false))) {
        /* The fence may have been raised, but not above our attempt. */
        status = check_claim(slots, head, err);
        if (status != CER_OK)
            return status;
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
        if (newest >= 0 && read_committed(slots, head, newest, &info) &&
            info.position == position)
            return CER_OK;
        if (newest < 0 || !read_committed(slots, head, 1 - newest, &info) ||
            info.position != position)
            return cer_fail(err, CER_STATE,
                            "%s holds no committed state of position %llu",
                            slots->page_path, (unsigned long long)position);
    } while (!atomic_compare_exchange_weak(
        &slots->page->head, &head, with_newest(head, 1 - newest, false)));
    return CER_OK;
}

/* --- views --------------------------------------------------------------- */

/* The slot of the committed state at *position, or of the newest if NULL; -1
 * for none. */
static int
find_slot(const cer_slots *slots, uint64_t head, const uint64_t *position,
          cer_slots_info *out)
{
    int slot = committed_slot(slots, head, out);

    if (slot < 0 || position == NULL || out->position == *position)
        return slot;
    slot = 1 - slot;
    return read_committed(slots, head, slot, out) && out->position == *position
               ? slot
               : -1;
}

/* A truncated file is an error here, not a SIGBUS later. */
static cer_status
map_committed(cer_slots *slots, uint64_t head, int slot, size_t nbytes,
              cer_error *err)
{
    uint64_t number = atomic_load(&record_at(slots, head, slot)->file);
    cer_status status = map_file(slots, slot, number, false, err);
    size_t length = 0;

    if (status == CER_OK && slots->maps[slot]->file.size_bytes < nbytes)
        status = map_slot(slots, slot, number, false, err);
    if (status == CER_OK)
        status = file_length(slots, slot, &length, err);
    if (status == CER_OK &&
        (length < nbytes || slots->maps[slot]->file.size_bytes < nbytes))
        status =
            cer_fail(err, CER_CORRUPT, "%s is corrupt: it has been truncated",
                     slots->paths[slot]);
    return status;
}

/* Makes the view of a slot with a valid record, out->info. */
static cer_status
look_at(cer_slots *slots, uint64_t head, int slot, cer_slots_view *out,
        cer_error *err)
{
    cer_status status = map_committed(slots, head, slot, out->info.nbytes, err);

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
    cer_status status = CER_OK;

    for (;;) {
        uint64_t head = atomic_load(&slots->page->head);
        int slot = find_slot(slots, head, position, &out->info);

        out->map = NULL;
        if (slot >= 0)
            status = look_at(slots, head, slot, out, err);
        else
            status = cer_fail(err, CER_STATE, "%s holds no committed state%s",
                              slots->page_path,
                              position == NULL ? "" : " of that position");
        if (!has_changed(slots, head)) /* else the file may have changed */
            return status;
        if (status == CER_OK)
            cer_slots_map_release(out->map);
    }
}

/* --- seals --------------------------------------------------------------- */
/* Whether the slot's bytes match the seal; then the caller releases *out. */
static bool
look_at_sealed(cer_slots *slots, uint64_t head, int slot, cer_slots_view *out)
{
    cer_hash128 sealed, hash;

    if (!read_sealed_record(slots, head, slot, &out->info, &sealed) ||
        look_at(slots, head, slot, out, NULL) != CER_OK)
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
    uint64_t head = atomic_load(&slots->page->head);
    cer_slots_info info[2];
    cer_hash128 unused;
    bool sealed[2];
    int first;

    for (int slot = 0; slot < 2; slot++)
        sealed[slot] =
            read_sealed_record(slots, head, slot, &info[slot], &unused);
    first = sealed[1] && (!sealed[0] || info[1].position > info[0].position);
    return look_at_sealed(slots, head, first, out) ||
           look_at_sealed(slots, head, 1 - first, out);
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

/* --- checking ------------------------------------------------------------ */

/* A page as read, or why it could not be read. Compared byte by byte. */
typedef struct page_copy {
    page page;
    uint8_t too_much[8]; /* bytes past the end of a page */
    size_t size_bytes;   /* bytes read */
    cer_error problem;
} page_copy;

static void
copy_page(const cer_slots *slots, page_copy *out)
{
    int fd = -1;

    memset(out, 0, sizeof *out);
    if (cer_fsio_open_read(slots->page_path, &fd, &out->problem) != CER_OK)
        return;
    (void)cer_fsio_read(fd, out, offsetof(page_copy, size_bytes),
                        &out->size_bytes, slots->page_path, &out->problem);
    (void)close(fd);
}

/* Whether the page is empty: it is missing or was just made. */
static bool
is_blank(const page_copy *copy)
{
    static const uint8_t zeros[PAGE_BYTES];

    if (copy->problem.status != CER_OK)
        return copy->problem.os_errno == ENOENT;
    return copy->size_bytes <= PAGE_BYTES &&
           memcmp(&copy->page, zeros, PAGE_BYTES) == 0;
}

static void
check_page_copy(cer_slots *slots, const page_copy *copy, cer_slots_damage *out)
{
    if (copy->problem.status != CER_OK)
        (void)cer_fail(&out->what, CER_CORRUPT, "it cannot be read (%s)",
                       copy->problem.message);
    else if (copy->size_bytes > PAGE_BYTES)
        (void)cer_fail(&out->what, CER_CORRUPT,
                       "it is larger than a commit page of slots");
    else if (copy->size_bytes < PAGE_BYTES)
        (void)cer_fail(&out->what, CER_CORRUPT,
                       "it is not a commit page of slots");
    else
        (void)check_page(slots, false, "it", &out->what);
    if (out->what.status != CER_OK)
        out->suffix = page_suffix;
}

/* Compares a state with its seal. The file is read, not mapped, because
 * truncation by another program must not cause a SIGBUS. */
static cer_status
check_state(const cer_slots *slots, int slot, size_t nbytes, cer_hash128 sealed,
            cer_slots_damage *out, cer_error *err)
{
    const char *path = slots->paths[slot];
    cer_error problem = {0};
    cer_status status = CER_OK;
    uint8_t *bytes = NULL;
    struct stat file;
    cer_hash128 hash;
    size_t got = 0;
    int fd = -1;

    if (cer_fsio_open_read(path, &fd, &problem) != CER_OK ||
        (fstat(fd, &file) < 0 &&
         cer_fail_errno(&problem, errno, "cannot inspect %s", path) != CER_OK))
        goto done;
    if ((uint64_t)file.st_size >= nbytes) { /* else nbytes may be arbitrary */
        bytes = cer_alloc(nbytes > 0 ? nbytes : 1);
        if (bytes == NULL) {
            status = cer_fail(err, CER_NOMEM, "out of memory reading %s", path);
            goto done;
        }
        if (cer_fsio_read(fd, bytes, nbytes, &got, path, &problem) != CER_OK)
            goto done;
    }
    if (bytes == NULL || got < nbytes) {
        (void)cer_fail(&out->what, CER_CORRUPT, "it is truncated");
        goto done;
    }
    hash = cer_hash128_of(bytes, nbytes);
    if (hash.low != sealed.low || hash.high != sealed.high)
        (void)cer_fail(&out->what, CER_CORRUPT,
                       "it is damaged: its checksum differs from its seal");

done:
    if (problem.status != CER_OK)
        (void)cer_fail(&out->what, CER_CORRUPT, "it cannot be read (%s)",
                       problem.message);
    if (out->what.status != CER_OK)
        out->suffix = suffixes[slot];
    cer_free(bytes);
    if (fd >= 0)
        (void)close(fd);
    return status;
}

/* Checks the records of a page, and their states. */
static cer_status
check_records(const cer_slots *slots, cer_slots_damage *out, cer_error *err)
{
    uint64_t head = atomic_load(&slots->page->head);
    cer_status status = CER_OK;
    cer_slots_info info;
    cer_hash128 sealed;

    for (int slot = 0; slot < 2 && status == CER_OK && out->suffix == NULL;
         slot++) {
        if (read_sealed_record(slots, head, slot, &info, &sealed)) {
            status = check_state(slots, slot, info.nbytes, sealed, out, err);
        } else if (slot == newest_of(head)) { /* the other may be in use */
            out->suffix = page_suffix;
            (void)cer_fail(&out->what, CER_CORRUPT,
                           "its record of the newest state is damaged");
        }
    }
    return status;
}

cer_status
cer_slots_check(const char *stem, cer_slots_damage *out, cer_error *err)
{
    cer_slots slots = {.begun = -1};
    page_copy first, copy;
    cer_status status;

    memset(out, 0, sizeof *out);
    if ((status = name_files(&slots, stem, err)) != CER_OK)
        goto done;
    copy_page(&slots, &first);
    if (is_blank(&first))
        goto done;
    slots.page = &first.page;
    check_page_copy(&slots, &first, out);
    if (out->suffix == NULL)
        status = check_records(&slots, out, err);
    if (out->suffix != NULL) {
        copy_page(&slots, &copy);
        out->in_use = memcmp(&first, &copy, sizeof first) != 0;
    }

done:
    free_names(&slots);
    return status;
}
