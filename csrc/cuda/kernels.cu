/* kernels.cu -- makes batches from columns in device memory.
 * csrc/core/kernels.h describes the kernels, kernels_args.h their arguments;
 * the arithmetic is in kernels_arith.h, shared with the CPU references.
 *
 * All kernels use the same tiling (cer_tiling): a block of 256 threads handles
 * about 1024 items, thread t of them items t, t + 256, ..., so neighbors access
 * neighboring bytes. A long row spans several blocks and short rows share one,
 * so threads are busy at every row width. Short-lived blocks instead of a fixed
 * grid leave load balancing to the hardware.
 *
 * The copying kernels issue all their loads before the first store. Four in
 * flight per thread are 64 KB on a multiprocessor that holds four blocks, with
 * items of 16 bytes; an H200's memory needs about 15 KB of each of its 132
 * multiprocessors in flight to be busy (half of 4.8 TB/s are reads, at a
 * latency under a microsecond).
 *
 * The tests also compile this file as C++ and run it on the CPU, one thread
 * after another, twice per block: first up to the barrier, then in full. Code
 * before a barrier may therefore only write shared memory, a kernel may have at
 * most one barrier, and nothing may be written twice with different values. */
#include "../core/kernels_arith.h"
#include "../core/lanes_shared.h"
#include "../core/native_shared.h"

enum { STRIDES = CER_KERNEL_TILE / CER_KERNEL_THREADS };

/* A function of this file; always inlined. */
#define INLINE static __device__ __forceinline__

/* --- a block's tile ------------------------------------------------ */

struct tile {
    uint64_t first_row;
    uint32_t first_item; /* of its rows */
    uint32_t count;      /* items, of all its rows */
};

struct place {
    uint64_t row; /* of the batch */
    uint32_t slot, item;
};

INLINE tile
this_tile(const cer_tiling &t)
{
    uint32_t group = blockIdx.x / t.chunks, chunk = blockIdx.x % t.chunks;
    uint32_t first = chunk * CER_KERNEL_TILE, rest = t.items - first;
    tile here;

    here.first_row = (uint64_t)group * t.rows;
    here.first_item = first;
    here.count = t.chunks == 1            ? t.rows * t.items
                 : rest < CER_KERNEL_TILE ? rest
                                          : (uint32_t)CER_KERNEL_TILE;
    return here;
}

/* Finds item `local` of the tile; false if it does not exist. */
INLINE bool
find_place(const cer_tiling &t, const tile &here, uint32_t local, place *p)
{
    p->slot = cer_divide(t.by_items, local);
    p->row = here.first_row + p->slot;
    p->item = here.first_item + local - p->slot * t.items;
    return local < here.count && p->row < t.n_rows;
}

/* --- where rows are ------------------------------------------------------- */

/* The place of row i of the batch: x its number in part y. */
INLINE uint2
place_of(const cer_kernel_source &from, uint64_t i)
{
    return __ldg((const uint2 *)from.places + i);
}

INLINE const uint8_t *
row_at(const cer_kernel_source &from, uint64_t i, uint64_t row_bytes)
{
    if (from.contiguous)
        return from.src + i * row_bytes;
    const uint2 at = place_of(from, i);

    return from.parts[at.y].src + at.x * row_bytes;
}

/* The values of the part of ragged row i, and the row's two offsets in them. */
INLINE const uint8_t *
things_of(const cer_kernel_source &from, uint64_t i, const int64_t **offset)
{
    if (from.contiguous) {
        *offset = from.offsets + i;
        return from.src;
    }
    const uint2 at = place_of(from, i);

    *offset = from.parts[at.y].offsets + at.x;
    return from.parts[at.y].src;
}

/* --- rows as they are ----------------------------------------------------- */

/* The same for one row per stride. The loads do not wait for each other. */
INLINE void
rows_at(const cer_kernel_source &from, const place *p, uint64_t row_bytes,
        const uint8_t **src)
{
    uint2 at[STRIDES];

    if (from.contiguous) {
#pragma unroll
        for (uint32_t k = 0; k < STRIDES; k++)
            src[k] = from.src + p[k].row * row_bytes;
        return;
    }
#pragma unroll
    for (uint32_t k = 0; k < STRIDES; k++)
        at[k] = place_of(from, p[k].row);
#pragma unroll
    for (uint32_t k = 0; k < STRIDES; k++)
        src[k] = from.parts[at[k].y].src + at[k].x * row_bytes;
}

/* A thread beyond the end reads the tile's first item, so that its loads need
 * no branches, and writes nothing. */
template <typename vector>
INLINE void
copy_rows(const cer_rows_args &a)
{
    const tile here = this_tile(a.tiling);
    const uint8_t *src[STRIDES];
    bool there[STRIDES];
    vector moved[STRIDES];
    place p[STRIDES];

#pragma unroll
    for (uint32_t k = 0; k < STRIDES; k++) {
        there[k] = find_place(a.tiling, here,
                              threadIdx.x + k * CER_KERNEL_THREADS, &p[k]);
        p[k].row = there[k] ? p[k].row : here.first_row;
        p[k].item = there[k] ? p[k].item : here.first_item;
    }
    rows_at(a.from, p, a.row_bytes, src);
#pragma unroll
    for (uint32_t k = 0; k < STRIDES; k++)
        moved[k] = __ldg((const vector *)src[k] + p[k].item);
#pragma unroll
    for (uint32_t k = 0; k < STRIDES; k++)
        if (there[k])
            ((vector *)(a.dst + p[k].row * a.row_bytes))[p[k].item] = moved[k];
}

/* --- groups of values ----------------------------------------------------- */

struct group {
    uint64_t raw[CER_KERNEL_GROUP];
    uint32_t channel[CER_KERNEL_GROUP];
};

/* Reads a whole, aligned group at `at`. */
INLINE void
read_whole(group *g, const uint8_t *at, uint32_t bytes)
{
    if (bytes == 1) {
        uint32_t x = __ldg((const uint32_t *)at);

        for (uint32_t k = 0; k < 4; k++)
            g->raw[k] = x >> 8 * k & 0xff;
    } else if (bytes == 2) {
        uint2 x = __ldg((const uint2 *)at);

        g->raw[0] = x.x & 0xffff;
        g->raw[1] = x.x >> 16;
        g->raw[2] = x.y & 0xffff;
        g->raw[3] = x.y >> 16;
    } else if (bytes == 4) {
        uint4 x = __ldg((const uint4 *)at);

        g->raw[0] = x.x;
        g->raw[1] = x.y;
        g->raw[2] = x.z;
        g->raw[3] = x.w;
    } else {
        for (uint32_t k = 0; k < 4; k += 2) {
            uint4 x = __ldg((const uint4 *)at + k / 2);

            g->raw[k] = (uint64_t)x.y << 32 | x.x;
            g->raw[k + 1] = (uint64_t)x.w << 32 | x.z;
        }
    }
}

INLINE void
write_whole(uint8_t *at, uint32_t bytes, const uint64_t *raw)
{
    if (bytes == 1) {
        *(uint32_t *)at =
            ((uint32_t)raw[0] & 0xff) | ((uint32_t)raw[1] & 0xff) << 8 |
            ((uint32_t)raw[2] & 0xff) << 16 | (uint32_t)raw[3] << 24;
    } else if (bytes == 2) {
        *(uint2 *)at =
            make_uint2(((uint32_t)raw[0] & 0xffff) | (uint32_t)raw[1] << 16,
                       ((uint32_t)raw[2] & 0xffff) | (uint32_t)raw[3] << 16);
    } else if (bytes == 4) {
        *(uint4 *)at = make_uint4((uint32_t)raw[0], (uint32_t)raw[1],
                                  (uint32_t)raw[2], (uint32_t)raw[3]);
    } else {
        for (uint32_t k = 0; k < 4; k += 2)
            ((uint4 *)at)[k / 2] =
                make_uint4((uint32_t)raw[k], (uint32_t)(raw[k] >> 32),
                           (uint32_t)raw[k + 1], (uint32_t)(raw[k + 1] >> 32));
    }
}

/* The first n values of the group. */
INLINE void
write_group(uint8_t *at, uint32_t bytes, const uint64_t *raw, uint32_t n,
            uint32_t aligned)
{
    if (aligned) {
        write_whole(at, bytes, raw);
        return;
    }
#pragma unroll
    for (uint32_t k = 0; k < CER_KERNEL_GROUP; k++)
        if (k < n)
            cer_raw_store(at + k * bytes, bytes, raw[k]);
}

/* Channels of a row's values from value `first` on. */
INLINE void
number_channels(group *g, const cer_kernel_values &v, uint32_t first)
{
    const uint32_t n = v.by_channels.divisor;
    uint32_t c = first - cer_divide(v.by_channels, first) * n;

#pragma unroll
    for (uint32_t k = 0; k < CER_KERNEL_GROUP; k++) {
        g->channel[k] = c;
        c = c + 1 == n ? 0 : c + 1;
    }
}

/* Copies a table to shared memory, where random reads are cheap; tables that
 * are too large stay in global memory. */
template <cer_value_mode mode>
INLINE const uint8_t *
stage_tables(const cer_kernel_values &v, uint8_t *nearby)
{
    if constexpr (mode == CER_VALUES_TABLE) {
        const uint32_t bytes = v.tables * 256 * v.out_bytes;

        if (bytes <= CER_KERNEL_TABLE) {
            for (uint32_t at = threadIdx.x * 16; at < bytes;
                 at += CER_KERNEL_THREADS * 16)
                *(uint4 *)(nearby + at) =
                    __ldg((const uint4 *)(v.constants + at));
            return nearby;
        }
    }
    return v.constants;
}

template <cer_value_mode mode> struct nearby_tables {
    enum { BYTES = mode == CER_VALUES_TABLE ? CER_KERNEL_TABLE : 16 };
};

/* --- rows of values ------------------------------------------------------- */

template <cer_value_mode mode>
INLINE void
convert_rows(const cer_values_args &a)
{
    __shared__ __align__(16) uint8_t nearby[nearby_tables<mode>::BYTES];
    const cer_kernel_values &v = a.values;
    const uint8_t *table = stage_tables<mode>(v, nearby);
    const tile here = this_tile(a.tiling);

    if (mode == CER_VALUES_TABLE)
        __syncthreads();
    CER_ROLLED
    for (uint32_t stride = 0; stride < STRIDES; stride++) {
        group g;
        place p;

        if (!find_place(a.tiling, here,
                        threadIdx.x + stride * CER_KERNEL_THREADS, &p))
            continue;
        const uint32_t first = p.item * CER_KERNEL_GROUP;
        const uint32_t rest = a.elements - first;
        const uint8_t *src =
            row_at(a.from, p.row, a.row_bytes) + (uint64_t)first * v.in_bytes;

        if (a.aligned) {
            read_whole(&g, src, v.in_bytes);
        } else {
#pragma unroll
            for (uint32_t k = 0; k < CER_KERNEL_GROUP; k++)
                g.raw[k] = cer_raw_load(src + (k < rest ? k : 0) * v.in_bytes,
                                        v.in_bytes);
        }
        number_channels(&g, v, first);
        cer_values_make(mode, &v, table, g.channel, g.raw, CER_KERNEL_GROUP);
        write_group(a.dst + (p.row * a.elements + first) * v.out_bytes,
                    v.out_bytes, g.raw, rest, a.aligned);
    }
}

/* --- images --------------------------------------------------------------- */

/* One thread per image draws its moves; the rest of the block waits. */
INLINE void
draw_slots(const cer_image_args &a, const tile &here, cer_drawn *drawn)
{
    const uint64_t row = here.first_row + threadIdx.x;
    uint64_t number = 0;

    if (threadIdx.x >= a.tiling.rows || row >= a.tiling.n_rows)
        return;
    if (a.draws) {
        const uint2 at = place_of(a.from, row);

        number = a.from.parts[at.y].first_row + at.x;
    }
    cer_draw_moves(&a, number, &drawn[threadIdx.x]);
}

/* Computes a group of values, of one channel or of any pixels and channels:
 * from[k] is the source pixel; fill[k] is not 0 if there is no source pixel. */
template <cer_value_mode mode>
INLINE void
make_pixels(const cer_image_args &a, const uint8_t *table, const uint8_t *src,
            const uint32_t *from, const uint32_t *fill, group *g)
{
    const cer_kernel_values &v = a.values;

#pragma unroll
    for (uint32_t k = 0; k < CER_KERNEL_GROUP; k++)
        g->raw[k] = cer_raw_load(
            src + ((uint64_t)from[k] * a.channels + g->channel[k]) * v.in_bytes,
            v.in_bytes);
    cer_values_make(mode, &v, table, g->channel, g->raw, CER_KERNEL_GROUP);
#pragma unroll
    for (uint32_t k = 0; k < CER_KERNEL_GROUP; k++)
        if (fill[k] != 0)
            g->raw[k] = cer_fill_raw(&v, fill[k] - 1, g->channel[k]);
}

INLINE uint32_t
source_pixel(const cer_image_args &a, const cer_drawn &drawn, uint32_t y,
             uint32_t x, uint32_t *fill)
{
    int32_t source_y = (int32_t)y, source_x = (int32_t)x;

    *fill = cer_find_pixel(&a, &drawn, &source_y, &source_x);
    return *fill != 0 ? 0 : (uint32_t)source_y * a.width + (uint32_t)source_x;
}

/* A group of pixels in a line: located once, then done channel by channel. */
template <cer_value_mode mode>
INLINE void
put_planes(const cer_image_args &a, const uint8_t *table, const place &p,
           const cer_drawn &drawn)
{
    const cer_kernel_values &v = a.values;
    const uint32_t y = cer_divide(a.by_line, p.item);
    const uint32_t first = (p.item - y * a.by_line.divisor) * CER_KERNEL_GROUP;
    const uint32_t rest = a.out[1] - first;
    const uint64_t plane = (uint64_t)a.out[0] * a.out[1];
    const uint8_t *src = row_at(a.from, p.row, a.row_bytes);
    uint8_t *dst =
        a.dst + (p.row * plane * a.channels + (uint64_t)y * a.out[1] + first) *
                    v.out_bytes;
    uint32_t from[CER_KERNEL_GROUP], fill[CER_KERNEL_GROUP];
    group g;

#pragma unroll
    for (uint32_t k = 0; k < CER_KERNEL_GROUP; k++)
        from[k] =
            source_pixel(a, drawn, y, first + (k < rest ? k : 0), &fill[k]);
    CER_ROLLED
    for (uint32_t c = 0; c < a.channels; c++) {
#pragma unroll
        for (uint32_t k = 0; k < CER_KERNEL_GROUP; k++)
            g.channel[k] = c;
        make_pixels<mode>(a, table, src, from, fill, &g);
        write_group(dst + c * plane * v.out_bytes, v.out_bytes, g.raw, rest,
                    a.aligned);
    }
}

/* A group of adjacent values, of one pixel or several. */
template <cer_value_mode mode>
INLINE void
put_pixels(const cer_image_args &a, const uint8_t *table, const place &p,
           const cer_drawn &drawn)
{
    const cer_kernel_values &v = a.values;
    const uint32_t elements = a.out[0] * a.out[1] * a.channels;
    const uint32_t first = p.item * CER_KERNEL_GROUP, rest = elements - first;
    const uint8_t *src = row_at(a.from, p.row, a.row_bytes);
    uint32_t from[CER_KERNEL_GROUP], fill[CER_KERNEL_GROUP];
    uint32_t pixel = cer_divide(v.by_channels, first);
    group g;

    number_channels(&g, v, first);
#pragma unroll
    for (uint32_t k = 0; k < CER_KERNEL_GROUP; k++) {
        if (k >= rest) { /* beyond the image: any valid pixel */
            g.channel[k] = g.channel[0];
            from[k] = from[0];
            fill[k] = fill[0];
            continue;
        }
        pixel += k != 0 && g.channel[k] == 0;
        const uint32_t y = cer_divide(a.by_line, pixel);

        from[k] = source_pixel(a, drawn, y, pixel - y * a.out[1], &fill[k]);
    }
    make_pixels<mode>(a, table, src, from, fill, &g);
    write_group(a.dst + (p.row * elements + first) * v.out_bytes, v.out_bytes,
                g.raw, rest, a.aligned);
}

template <cer_value_mode mode, bool planes>
INLINE void
move_images(const cer_image_args &a)
{
    __shared__ __align__(16) uint8_t nearby[nearby_tables<mode>::BYTES];
    __shared__ cer_drawn drawn[CER_KERNEL_SLOTS];
    const uint8_t *table = stage_tables<mode>(a.values, nearby);
    const tile here = this_tile(a.tiling);

    draw_slots(a, here, drawn);
    __syncthreads();
    CER_ROLLED
    for (uint32_t stride = 0; stride < STRIDES; stride++) {
        place p;

        if (!find_place(a.tiling, here,
                        threadIdx.x + stride * CER_KERNEL_THREADS, &p))
            continue;
        if (planes)
            put_planes<mode>(a, table, p, drawn[p.slot]);
        else
            put_pixels<mode>(a, table, p, drawn[p.slot]);
    }
}

/* --- ragged rows ---------------------------------------------------------- */

/* Writes ones for the row's things among those that begin in the group. */
INLINE void
put_mask(const cer_ragged_args &a, uint64_t row, uint32_t first,
         uint32_t things)
{
    uint8_t *mask = a.mask + row * a.length;
    uint32_t thing = cer_divide(a.by_thing, first);
    uint32_t next = thing * a.by_thing.divisor;

    if (next < first) {
        thing++;
        next += a.by_thing.divisor;
    }
    for (; next < first + CER_KERNEL_GROUP && thing < a.length;
         thing++, next += a.by_thing.divisor)
        mask[thing] = thing < things;
}

template <cer_value_mode mode>
INLINE void
put_things(const cer_ragged_args &a, const uint8_t *table, uint64_t row,
           uint32_t first, uint32_t things, const uint8_t *src)
{
    const cer_kernel_values &v = a.values;
    const uint32_t elements = a.length * a.per_thing, rest = elements - first;
    const uint32_t there = things * a.per_thing; /* the rest is padding */
    group g;

    number_channels(&g, v, first);
    if (first < there) {
#pragma unroll
        for (uint32_t k = 0; k < CER_KERNEL_GROUP; k++)
            g.raw[k] = cer_raw_load(
                src + (uint64_t)(first + (first + k < there ? k : 0)) *
                          v.in_bytes,
                v.in_bytes);
        cer_values_make(mode, &v, table, g.channel, g.raw, CER_KERNEL_GROUP);
    }
#pragma unroll
    for (uint32_t k = 0; k < CER_KERNEL_GROUP; k++)
        if (first + k >= there)
            g.raw[k] = cer_fill_raw(&v, 0, g.channel[k]);
    write_group(a.dst + (row * elements + first) * v.out_bytes, v.out_bytes,
                g.raw, rest, a.aligned);
}

template <cer_value_mode mode>
INLINE void
pad_rows(const cer_ragged_args &a)
{
    __shared__ __align__(16) uint8_t nearby[nearby_tables<mode>::BYTES];
    const uint8_t *table = stage_tables<mode>(a.values, nearby);
    const tile here = this_tile(a.tiling);

    if (mode == CER_VALUES_TABLE)
        __syncthreads();
    CER_ROLLED
    for (uint32_t stride = 0; stride < STRIDES; stride++) {
        place p;

        if (!find_place(a.tiling, here,
                        threadIdx.x + stride * CER_KERNEL_THREADS, &p))
            continue;
        const uint32_t first = p.item * CER_KERNEL_GROUP;
        const int64_t *offset;
        const uint8_t *src = things_of(a.from, p.row, &offset);
        const int64_t start = offset[0];
        const uint64_t all = (uint64_t)(offset[1] - start);
        const uint32_t things = a.max_length != 0 && all > a.max_length
                                    ? a.max_length
                                    : (uint32_t)all;

        if (p.item == 0)
            a.lengths[p.row] = things;
        put_mask(a, p.row, first, things);
        if (first < a.length * a.per_thing)
            put_things<mode>(a, table, p.row, first, things,
                             src + (uint64_t)start * a.thing_bytes);
    }
}

/* --- the kernels ---------------------------------------------------------- */

#define KERNEL(name, family, call)                                             \
    extern "C" __global__ void __launch_bounds__(CER_KERNEL_THREADS)           \
        name(const __grid_constant__ cer_##family##_args a)                    \
    {                                                                          \
        call(a);                                                               \
    }

KERNEL(cer_rows_16, rows, copy_rows<uint4>)
KERNEL(cer_rows_8, rows, copy_rows<uint2>)
KERNEL(cer_rows_4, rows, copy_rows<uint32_t>)
KERNEL(cer_rows_2, rows, copy_rows<uint16_t>)
KERNEL(cer_rows_1, rows, copy_rows<uint8_t>)
KERNEL(cer_values_table, values, convert_rows<CER_VALUES_TABLE>)
KERNEL(cer_values_float, values, convert_rows<CER_VALUES_FLOAT>)
KERNEL(cer_values_wide, values, convert_rows<CER_VALUES_WIDE>)
KERNEL(cer_planes_copy, image, (move_images<CER_VALUES_COPY, true>))
KERNEL(cer_planes_table, image, (move_images<CER_VALUES_TABLE, true>))
KERNEL(cer_planes_float, image, (move_images<CER_VALUES_FLOAT, true>))
KERNEL(cer_planes_wide, image, (move_images<CER_VALUES_WIDE, true>))
KERNEL(cer_pixels_copy, image, (move_images<CER_VALUES_COPY, false>))
KERNEL(cer_pixels_table, image, (move_images<CER_VALUES_TABLE, false>))
KERNEL(cer_pixels_float, image, (move_images<CER_VALUES_FLOAT, false>))
KERNEL(cer_pixels_wide, image, (move_images<CER_VALUES_WIDE, false>))
KERNEL(cer_ragged_copy, ragged, pad_rows<CER_VALUES_COPY>)
KERNEL(cer_ragged_table, ragged, pad_rows<CER_VALUES_TABLE>)
KERNEL(cer_ragged_float, ragged, pad_rows<CER_VALUES_FLOAT>)
KERNEL(cer_ragged_wide, ragged, pad_rows<CER_VALUES_WIDE>)

/* --- the native network ------------------------------------------------------
 * A thread makes one item. Not optimized for speed: see native_shared.h. */

#define NATIVE(name, function, family)                                         \
    extern "C" __global__ void __launch_bounds__(CER_KERNEL_THREADS)           \
        name(const __grid_constant__ cer_native_##family##_args a)             \
    {                                                                          \
        const uint64_t i =                                                     \
            (uint64_t)blockIdx.x * CER_KERNEL_THREADS + threadIdx.x;           \
                                                                               \
        if (i < a.items)                                                       \
            function(&a, i);                                                   \
    }

NATIVE(cer_native_pool_kernel, cer_native_pool, pool)
NATIVE(cer_native_unpool_kernel, cer_native_unpool, unpool)
NATIVE(cer_native_sum_kernel, cer_native_sum, sum)
NATIVE(cer_native_product_kernel, cer_native_product, product)
NATIVE(cer_native_score_kernel, cer_native_score, score)
NATIVE(cer_native_descend_kernel, cer_native_descend_one, descend)

/* --- lanes ---------------------------------------------------------------- */

extern "C" __global__ void
__launch_bounds__(CER_KERNEL_THREADS)
    cer_lane_kernel(const __grid_constant__ cer_lane_args a)
{
    const uint64_t i = (uint64_t)blockIdx.x * CER_KERNEL_THREADS + threadIdx.x;

    if (i < a.items)
        cer_lane_between(&a, i);
}
