// Decode attention over pages in equal shares, by mma.m16n8k16.  Compiled once per layout and config: `split_kv.py`
// names the macros (sizes, dtypes, and the parts of a CTA).
//
// Work.  16 keys of a sequence are a unit.  All units stand in one line: by sequence, then by set of a CTA's heads,
// then from the first visible key to the last.  CTA g takes units g W / G to (g + 1) W / G of all W.  The units of a
// sequence for one set are a segment.  Where shares cut it, each CTA keeps a part (fp32 values and a log-sum-exp), and
// the last warp to arrive at a counter merges them.
//
// Warps.  A warp has one virtual head: a KV head, or for groups above 16 query heads a KV head with 16 of them.  The
// warps of a CTA read the same positions, each for its own head; the heads are neighbours, so together they read whole
// runs of a page.
//
// Bytes.  Each warp fills its own ring by cp.async, STAGES - 1 units ahead, and waits for no other warp.
//
// No warp waits for a part: a warp that is not the last one at a counter goes on.

using u32 = unsigned int;
using u64 = unsigned long long;
using i64 = long long;
using u16 = unsigned short;
using u8 = unsigned char;

constexpr int UNIT = 16, TILES = D / 16;
constexpr int ROWS = GROUP < 16 ? GROUP : 16, ROW_TILES = (GROUP + 15) / 16, HALVES = ROWS > 8 ? 2 : 1;
constexpr int KEY_BYTES = D * (FP8 ? 1 : 2), CHUNKS = KEY_BYTES / 16;
// From key to key an odd number of 16-byte chunks: the eight rows that ldmatrix reads at once lie in different banks.
constexpr int PITCH = KEY_BYTES + (CHUNKS % 2 ? 0 : 16);
constexpr int ACROSS = CHUNKS > 4 ? 8 : 4, DOWN = 32 / ACROSS;  // lanes along a key, and keys at once
constexpr int STAGE_BYTES = 2 * UNIT * PITCH, THREADS = 32 * WARPS;
#define Q_SHARED (D > 128 && GROUP > 8)
constexpr int HEAD_SETS = H_KV * ROW_TILES / WARPS;
static_assert(STAGES > 1, "a ring of one unit would be read before its copies have arrived");
constexpr float LOG2E = 1.4426950408889634f, LN2 = 0.6931471805599453f;
#if BF16
#define KIND "bf16"  // dtype of queries and output, and of the factors of both products
#else
#define KIND "f16"
#endif
#define INFINITE __int_as_float(0x7f800000)

// ---- Instructions --------------------------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
__device__ __forceinline__ float log2_of(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two values as one word of the queries' dtype, the first one in the low half.
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 word;
    asm("cvt.rn." KIND "x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// Converts the two e4m3 values in the low half of `bytes`, exactly.
__device__ __forceinline__ u32 widen(u32 bytes) {
    u32 word;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(word) : "h"((u16)bytes));
#if BF16
    float low, high;
    asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}"
        : "=f"(low), "=f"(high) : "r"(word));
    word = pack(low, high);
#endif
    return word;
}

__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." KIND "." KIND ".f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Loads the operands of 16 values d for 16 keys, b[tile][half].  An fp8 matrix holds pairs, so a lane's d are the four
// from 4 (lane % 4) on; queries and output use the same order (`column`).
template <bool TRANSPOSED>
__device__ __forceinline__ void load_tile(u32 (&b)[2][2], u32 from) {
#if FP8
    u32 low, high;
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                     : "=r"(low), "=r"(high) : "r"(from) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                     : "=r"(low), "=r"(high) : "r"(from) : "memory");
    if (TRANSPOSED) {  // a word holds d and d + 1 of one key, then of the next key
        b[0][0] = widen(__byte_perm(low, 0, 0x4420)), b[0][1] = widen(__byte_perm(high, 0, 0x4420));
        b[1][0] = widen(__byte_perm(low, 0, 0x4431)), b[1][1] = widen(__byte_perm(high, 0, 0x4431));
    } else {
        b[0][0] = widen(low), b[0][1] = widen(low >> 16), b[1][0] = widen(high), b[1][1] = widen(high >> 16);
    }
#else
    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(b[0][0]), "=r"(b[0][1]), "=r"(b[1][0]), "=r"(b[1][1]) : "r"(from) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(b[0][0]), "=r"(b[0][1]), "=r"(b[1][0]), "=r"(b[1][1]) : "r"(from) : "memory");
#endif
}

// The first of the 16 values d in the pair `p` (0, 1) that a lane holds.
__device__ __forceinline__ int column(int p) {
    return FP8 ? 4 * (threadIdx.x % 4) + 2 * p : 8 * p + 2 * (threadIdx.x % 4);
}

// ---- Shares --------------------------------------------------------------------------------------------------------

// The number of keys that a sequence's query sees: the newest keys.
__device__ __forceinline__ int visible(int length, int window) { return max(min(length, window), 0); }
__device__ __forceinline__ int units_of(int length, int window) { return (visible(length, window) + UNIT - 1) / UNIT; }

// Cuts W units into shares for at most `ctas` CTAs, each with at least LEAST units unless there is only one.
__device__ __forceinline__ int shares_of(i64 units, int ctas) { return (int)max(min((i64)ctas, units / LEAST), 1ll); }
__device__ __forceinline__ i64 share_start(int g, i64 units, int shares) { return g * units / shares; }
__device__ __forceinline__ int owner_of(i64 unit, i64 units, int shares) {
    const i64 last = (unit + 1) * shares - 1;
    // last / units, without the 100 instructions of a division in 64 bits: the guess is off by at most 1.
    const int guess = (int)__fdividef((float)last, (float)units);
    return guess - (guess * units > last) + ((guess + 1) * units <= last);
}

// ---- From pages to a ring ------------------------------------------------------------------------------------------

// A place in the sequence of units: the unit that a warp loads next, or multiplies next.
struct Cursor {
    int b, set, key, end;  // sequence, set of heads, first key of the unit, one past the last key

    __device__ __forceinline__ void open(int length, int window) {
        end = length;
        key = length - visible(length, window);
    }
    // Moves to the next segment; the last segment has no next.
    __device__ __forceinline__ void skip(const int* lens, int B, int window) {
        if (++set == HEAD_SETS) {
            set = 0;
            do ++b;
            while (b < B && visible(lens[b], window) == 0);
        }
        open(b < B ? lens[b] : 0, window);
    }
    __device__ __forceinline__ int left() const { return (end - key + UNIT - 1) / UNIT; }
};

struct Keys {
    const u8 *k, *v;
    const int* table;
    i64 k_page, k_slot, k_head, v_page, v_slot, v_head, table_row;  // in bytes; table_row in entries
};

// The page of key `key + lane % UNIT`, 0 for a key past the end.
__device__ __forceinline__ int page_at(const Keys& keys, const Cursor& at) {
    const int key = at.key + threadIdx.x % UNIT;
    return key < at.end ? __ldg(keys.table + at.b * keys.table_row + (u32)key / BLOCK_SIZE) : 0;
}

// Copies 16 bytes past L1 (.cg); L2 fetches 128 from HBM at a time.
__device__ __forceinline__ void copy(u32 to, const u8* from, int bytes, u64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;"
                 ::"r"(to), "l"(from), "r"(bytes), "l"(policy) : "memory");
}

// Loads a unit's keys and values to a stage; past the end 0, because a page may hold NaN there, and 0 * NaN is NaN.
__device__ __forceinline__ void load_unit(const Keys& keys, const Cursor& at, int page, int kv_head, u32 stage,
                                          u64 policy) {
    const int lane = threadIdx.x % 32, row = lane / ACROSS, chunk = lane % ACROSS;
#pragma unroll
    for (int i = 0; i < UNIT / DOWN; ++i) {
        const int r = row + i * DOWN;
        const int bytes = at.key + r < at.end ? 16 : 0;
        const u64 slot = (u32)(at.key + r) % BLOCK_SIZE;
        const u64 own = (u32)__shfl_sync(~0u, page, r);  // 64 bits: page * stride passes 2**31 in a cache of 2 GiB
        const u8* k = keys.k + own * keys.k_page + slot * keys.k_slot + kv_head * keys.k_head + chunk * 16;
        const u8* v = keys.v + own * keys.v_page + slot * keys.v_slot + kv_head * keys.v_head + chunk * 16;
        const u32 to = stage + r * PITCH + chunk * 16;
#pragma unroll
        for (int c = 0; c < CHUNKS; c += ACROSS)
            if (CHUNKS % ACROSS == 0 || c + chunk < CHUNKS) {
                copy(to + c * 16, k + c * 16, bytes, policy);
                copy(to + UNIT * PITCH + c * 16, v + c * 16, bytes, policy);
            }
    }
}

// ---- Products ------------------------------------------------------------------------------------------------------

// The queries are in registers, or, where registers are full, in shared memory at each lane's own place.
struct State {
#if Q_SHARED
    uint4* shared;
#else
    u32 q[TILES][4];
#endif
    float acc[2 * TILES][4], peak[2], total[2];

    // Loads the queries of one virtual head; rows past the group's last one are 0.
    __device__ __forceinline__ void open(const u16* queries, i64 stride_h, int rows) {
        const int row = threadIdx.x % 32 / 4;
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            u32 words[4] = {};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int r = row + i % 2 * 8;
                const u16* from = queries + r * stride_h + 16 * j + column(i / 2);
                if (i % 2 < HALVES && r < rows) words[i] = PAIRS ? *(const u32*)from : from[0] | (u32)from[1] << 16;
            }
#if Q_SHARED
            shared[j * 32] = {words[0], words[1], words[2], words[3]};
#else
            for (int i = 0; i < 4; ++i) q[j][i] = words[i];
#endif
        }
#pragma unroll
        for (int n = 0; n < 2 * TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) acc[n][i] = 0;
        for (int h = 0; h < 2; ++h) peak[h] = -INFINITE, total[h] = 0;
    }

    // Adds a stage, of which `left` keys exist.  `factor` turns a product into an exponent of 2, or with SOFTCAP into
    // that of tanh; `cap2` is the cap in base 2.
    __device__ __forceinline__ void add(u32 stage, int left, float factor, float cap2) {
        const int lane = threadIdx.x % 32, row = lane % 8, low = lane / 8 % 2, high = lane / 16;
        const u32 down = (8 * low + row) * PITCH + (FP8 ? 0 : 16 * high);
        const u32 across = FP8 ? down : (8 * high + row) * PITCH + 16 * low;
        float s[2][4] = {};
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            u32 k[2][2];
            load_tile<false>(k, stage + across + j * (FP8 ? 16 : 32));
#if Q_SHARED
            const uint4 words = shared[j * 32];
            const u32 a[4] = {words.x, words.y, words.z, words.w};
#else
            const u32 (&a)[4] = q[j];
#endif
            mma(s[0], a, k[0][0], k[0][1]);
            mma(s[1], a, k[1][0], k[1][1]);
        }
        float most[2] = {-INFINITE, -INFINITE};
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float& x = s[i / 2][2 * h + i % 2];
#if SOFTCAP
                x = cap2 - 2 * cap2 * __fdividef(1.f, 1.f + exp2_of(x * factor));
#else
                x *= factor;
#endif
                if (i / 2 * 8 + lane % 4 * 2 + i % 2 >= left) x = -INFINITE;
                most[h] = fmaxf(most[h], x);
            }
            most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], 1));
            most[h] = fmaxf(most[h], __shfl_xor_sync(~0u, most[h], 2));
        }
        // Where no row of the warp has a new maximum, all factors are 1.
        if (__any_sync(~0u, most[0] > peak[0] || (HALVES == 2 && most[1] > peak[1]))) {
#pragma unroll
            for (int h = 0; h < HALVES; ++h) {
                const float higher = fmaxf(peak[h], most[h]);
                // Without a score above -inf so far, -inf - -inf would be NaN.
                const float rescale = peak[h] == -INFINITE ? 0.f : exp2_of(peak[h] - higher);
                peak[h] = higher;
                total[h] *= rescale;
#pragma unroll
                for (int n = 0; n < 2 * TILES; ++n) acc[n][2 * h] *= rescale, acc[n][2 * h + 1] *= rescale;
            }
        }
        u32 p[4] = {};
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            const float shift = peak[h] == -INFINITE ? 0.f : peak[h];
            float w[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) total[h] += w[i] = exp2_of(s[i / 2][2 * h + i % 2] - shift);
            p[h] = pack(w[0], w[1]), p[2 + h] = pack(w[2], w[3]);
        }
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            u32 v[2][2];
            load_tile<true>(v, stage + UNIT * PITCH + down + j * (FP8 ? 16 : 32));
            mma(acc[2 * j], p, v[0][0], v[0][1]);
            mma(acc[2 * j + 1], p, v[1][0], v[1][1]);
        }
    }

    // Returns the pair `p` of tile `j` in row half `h`.
    __device__ __forceinline__ float2 pair(int j, int p, int h) const {
        return FP8 ? float2{acc[2 * j][2 * h + p], acc[2 * j + 1][2 * h + p]}
                   : float2{acc[2 * j + p][2 * h], acc[2 * j + p][2 * h + 1]};
    }
};

// ---- Results and parts ---------------------------------------------------------------------------------------------

// Adds a sink to lse2 (log-sum-exp, base 2) and returns the factor for the output.
__device__ __forceinline__ float sink_in(float& lse2, const float* sinks, int head) {
    if (!sinks) return 1.f;
    const float sink2 = sinks[head] * LOG2E, most = fmaxf(lse2, sink2);
    if (most == -INFINITE) return 1.f;
    const float keys = exp2_of(lse2 - most), all = keys + exp2_of(sink2 - most);
    lse2 = most + log2_of(all);
    return keys / all;
}

// Pointers and strides of the results.
struct Output {
    u16* out;
    float* lse;
    const float* sinks;
    i64 out_t, out_h, lse_t, lse_h;

    __device__ __forceinline__ void put(int b, int head, int d, float x, float y) const {
        u16* to = out + b * out_t + head * out_h + d;
        const u32 word = pack(x, y);
#if PAIRS
        *reinterpret_cast<u32*>(to) = word;
#else
        to[0] = (u16)word, to[1] = (u16)(word >> 16);
#endif
    }
    __device__ __forceinline__ void put_lse(int b, int head, float lse2) const {
        if (lse) lse[b * lse_t + head * lse_h] = lse2 * LN2;
    }
};

// Counts the part of this warp, one of `count`; true for the last warp, which may read the parts of the others.  The
// counter is 0 before and after.  Release orders this warp's part before its count; acquire orders the last warp's
// reads after all counts.
__device__ __forceinline__ bool count_part(u32* counter, int count) {
    u32 before = 0;
    __syncwarp();  // the parts of all lanes come before lane 0's release
    if (threadIdx.x % 32 == 0)
        asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;"
                     : "=r"(before) : "l"(counter), "r"(count - 1) : "memory");
    before = __shfl_sync(~0u, before, 0);
    __syncwarp();  // lane 0's acquire comes before the reads of all lanes
    return before == count - 1;
}

constexpr int BATCH = CTAS_PER_SM * WARPS > 8 ? 2 : 4;  // parts in flight at once, as many as registers allow
// A pass merges up to 512 values of each part: four float4 a lane.
constexpr int ROWS_AT_ONCE = D >= 512 / ROWS ? 512 / D : ROWS, FOURS = (ROWS_AT_ONCE * D + 127) / 128;

// The parts of a virtual head of a segment, one of each share from `first` to `last`.
struct Parts {
    float *values, *lse2;
    u32* counters;
    int first, last, warp;

    // A CTA leaves at most two parts: of a segment that began before its share, and of one that begins in it.
    __device__ __forceinline__ i64 row_of(int share) const {
        return ((i64)(share * 2 + (share == first)) * WARPS + warp) * ROWS;
    }

    // Merges `count` parts, of each `step`-th share from `from` on, in their order, into the part of `from`, or into
    // the output.
    __device__ __forceinline__ void merge(int from, int step, int count, bool all, const Output& to, int b, int head,
                                        int rows) const {
        const int lane = threadIdx.x % 32;
#pragma unroll 1
        for (int top = 0; top < rows; top += ROWS_AT_ONCE) {
            const int size = min(ROWS_AT_ONCE, rows - top) * D;
            float4 sum[FOURS];
            float most[FOURS], total[FOURS];
#pragma unroll
            for (int c = 0; c < FOURS; ++c) sum[c] = {0, 0, 0, 0}, most[c] = -INFINITE, total[c] = 0;
#pragma unroll 1
            for (int i = 0; i < count; i += BATCH) {
                float4 part[BATCH][FOURS];
                float own[BATCH][FOURS];
#pragma unroll
                for (int j = 0; j < BATCH; ++j)
#pragma unroll
                    for (int c = 0; c < FOURS; ++c) {
                        const int at = 4 * (32 * c + lane);
                        part[j][c] = {0, 0, 0, 0}, own[j][c] = -INFINITE;
                        if (i + j >= count || at >= size) continue;
                        const i64 row = row_of(from + (i + j) * step) + top;
                        part[j][c] = *reinterpret_cast<const float4*>(values + row * D + at);
                        own[j][c] = lse2[row + at / D];
                    }
#pragma unroll
                for (int j = 0; j < BATCH; ++j)
#pragma unroll
                    for (int c = 0; c < FOURS; ++c) {
                        const float higher = fmaxf(most[c], own[j][c]), shift = higher == -INFINITE ? 0.f : higher;
                        const float keep = exp2_of(most[c] - shift), weight = exp2_of(own[j][c] - shift);
                        most[c] = higher;
                        total[c] = total[c] * keep + weight;
                        sum[c].x = sum[c].x * keep + part[j][c].x * weight;
                        sum[c].y = sum[c].y * keep + part[j][c].y * weight;
                        sum[c].z = sum[c].z * keep + part[j][c].z * weight;
                        sum[c].w = sum[c].w * keep + part[j][c].w * weight;
                    }
            }
            __syncwarp();  // no lane still reads what is written next
#pragma unroll
            for (int c = 0; c < FOURS; ++c) {
                const int at = 4 * (32 * c + lane), row = top + at / D, d = at % D;
                if (at >= size) continue;
                float all_lse2 = total[c] == 0 ? -INFINITE : most[c] + log2_of(total[c]);
                float by = total[c] == 0 ? 0.f : 1.f / total[c];
                if (all) {
                    by *= sink_in(all_lse2, to.sinks, head + row);
                    to.put(b, head + row, d, sum[c].x * by, sum[c].y * by);
                    to.put(b, head + row, d + 2, sum[c].z * by, sum[c].w * by);
                    if (d == 0) to.put_lse(b, head + row, all_lse2);
                } else {
                    float4* mine = reinterpret_cast<float4*>(values + (row_of(from) + top) * D + at);
                    *mine = {sum[c].x * by, sum[c].y * by, sum[c].z * by, sum[c].w * by};
                    if (d == 0) lse2[row_of(from) + row] = all_lse2;
                }
            }
        }
    }

    // A warp comes here when it has written the part of share `g`.  The last one of a group merges the group's parts,
    // and waits for none.  More than WIDTH parts are merged in about sqrt(count) groups, and then the groups' sums.
    __device__ __forceinline__ void merge_arrived(int g, const Output& to, int b, int head, int rows) const {
        int index = g - first, left = last - first + 1, step = 1, fan = left;
        if (left > WIDTH)
            for (fan = 1; fan * fan < left;) ++fan;
#pragma unroll 1
        for (int level = 0; left > 1; ++level) {
            const int group = index / fan, count = min(fan, left - group * fan), from = first + group * fan * step;
            left = (left + fan - 1) / fan;
            if (count > 1) {
                // Groups of level 0 count at each `fan`-th share, and level 1 at the place behind the first.  The next
                // segment begins in share `last` at the earliest, where this one does not count.
                if (!count_part(counters + (from + level) * WARPS + warp, count)) return;
                merge(from, step, count, left == 1, to, b, head, rows);
            }
            index = group, step *= fan;
        }
    }
};

// ---- The kernel ----------------------------------------------------------------------------------------------------

// A sequence without a visible key has no unit: CTA g of G writes zeros for the sequences g, g + G, ...
__device__ __forceinline__ void write_empty(const Output& to, const int* lens, int B, int window) {
    for (int b = blockIdx.x; b < B; b += gridDim.x) {
        if (visible(lens[b], window)) continue;
        for (int i = threadIdx.x; i < H_KV * GROUP * (D / 2); i += THREADS) {
            const int head = i / (D / 2), d = 2 * (i % (D / 2));
            to.put(b, head, d, 0, 0);
            float lse2 = -INFINITE;
            sink_in(lse2, to.sinks, head);
            if (d == 0) to.put_lse(b, head, lse2);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, CTAS_PER_SM)
split_kv(const u16* q, const u8* k_cache, const u8* v_cache, const int* table, const int* lens, const float* sinks,
         const float* k_scale, const float* v_scale, u16* out, float* lse, float* partial, float* partial_lse,
         u32* counters, int B, int window, float scale, float cap, i64 q_t, i64 q_h, i64 k_page, i64 k_slot, i64 k_head,
         i64 v_page, i64 v_slot, i64 v_head, i64 table_row, i64 out_t, i64 out_h, i64 lse_t, i64 lse_h) {
    extern __shared__ __align__(16) u8 raw[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = blockIdx.x;
    const u32 ring = (u32)__cvta_generic_to_shared(raw) + warp * STAGES * STAGE_BYTES;
    const Keys keys{k_cache, v_cache, table, k_page, k_slot, k_head, v_page, v_slot, v_head, table_row};
    const Output to{out, lse, sinks, out_t, out_h, lse_t, lse_h};
    u64 policy = 0;  // L2 gives up keys and values first, not parts and the table
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));

    // Every warp counts all units by itself, 32 lengths at a time: no barrier, and no kernel that plans before.
    i64 units = 0;
    for (int b = lane; b < B; b += 32) units += units_of(lens[b], window);
    for (int step = 16; step; step /= 2) units += __shfl_xor_sync(~0u, units, step);
    units *= HEAD_SETS;
    const int shares = shares_of(units, gridDim.x);
    const i64 start = share_start(g, units, shares), stop = g < shares ? share_start(g + 1, units, shares) : start;
    write_empty(to, lens, B, window);
    if (start >= stop) return;

    // Finds the sequence that has unit `start`, 32 sequences at a time.
    Cursor first{0, 0, 0, 0};
    i64 passed = 0;
    for (int base = 0;; base += 32) {
        const int own = base + lane < B ? units_of(lens[base + lane], window) * HEAD_SETS : 0;
        int sum = own;
        for (int step = 1; step < 32; step *= 2) {
            const int below = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += below;
        }
        const u32 behind = __ballot_sync(~0u, passed + sum > start);
        if (behind) {
            const int at = __ffs(behind) - 1;
            first.b = base + at;
            passed += __shfl_sync(~0u, sum - own, at);
            break;
        }
        passed += __shfl_sync(~0u, sum, 31);
    }
    const int length = lens[first.b], each = units_of(length, window), within = (int)(start - passed);
    first.set = within / each;
    first.open(length, window);
    first.key += within % each * UNIT;
    int segment = -(within % each);  // the segment's first unit, from `start` on

    const int count = (int)(stop - start);
    Cursor now = first;
    Cursor ahead = first;
    int page = page_at(keys, ahead);
    auto load = [&](int unit) {
        if (unit < count) {
            const Cursor at = ahead;
            const int here = page;
            ahead.key += UNIT;
            page = page_at(keys, ahead);  // looked up one unit early, so no copy waits for it
            load_unit(keys, at, here, (at.set * WARPS + warp) / ROW_TILES, ring + unit % STAGES * STAGE_BYTES, policy);
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
    };
    auto next_segment = [&] {
        if (ahead.key < ahead.end) return;
        ahead.skip(lens, B, window);
        page = page_at(keys, ahead);
    };
    for (int unit = 0; unit < STAGES - 1; ++unit) load(unit), next_segment();

    State state;
#if Q_SHARED
    state.shared = reinterpret_cast<uint4*>(raw + WARPS * STAGES * STAGE_BYTES + warp * TILES * 512) + lane;
#endif
#pragma unroll 1
    for (int unit = 0; unit < count;) {
        const int virtual_head = now.set * WARPS + warp, kv_head = virtual_head / ROW_TILES;
        const int row_tile = virtual_head % ROW_TILES, rows = min(GROUP - 16 * row_tile, ROWS);
        const int head = kv_head * GROUP + 16 * row_tile;
        state.open(q + now.b * q_t + head * q_h, q_h, rows);
        const float factor = scale * (k_scale ? k_scale[kv_head] : 1.f) * (SOFTCAP ? 2 * LOG2E / cap : LOG2E);
        const float cap2 = cap * LOG2E, v_factor = v_scale ? v_scale[kv_head] : 1.f;
#pragma unroll 1
        do {
            // Ends where this segment or the one being loaded ends, so the inner loop looks for no segment.
            int until = min(count, unit + now.left());
            if (unit + STAGES - 1 < count) until = min(until, unit + ahead.left());
#pragma unroll 1
            for (; unit < until; ++unit, now.key += UNIT) {
                // One cp.async group per unit, even an empty one: with STAGES - 2 pending, this unit's copies are done.
                asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
                __syncwarp();  // all copies have arrived, and no lane reads the stage that is filled next
                load(unit + STAGES - 1);
                state.add(ring + unit % STAGES * STAGE_BYTES, now.end - now.key, factor, cap2);
            }
            next_segment();
        } while (now.key < now.end && unit < count);

        // The segment is finished if it began in this share and ends here; otherwise a part is kept.
        const bool begun = segment >= 0, whole = begun && now.key >= now.end;
        const i64 place = ((g * 2 + begun) * WARPS + warp) * ROWS;
#pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            const int row = lane / 4 + 8 * h;
            float total = state.total[h];
            total += __shfl_xor_sync(~0u, total, 1);
            total += __shfl_xor_sync(~0u, total, 2);
            float lse2 = total == 0.f ? -INFINITE : state.peak[h] + log2_of(total);
            if (row >= rows) continue;
            const float over = total == 0.f ? 0.f : v_factor / total;
            const float by = over * (whole ? sink_in(lse2, sinks, head + row) : 1.f);
            float* part = partial + (place + row) * D;
#pragma unroll
            for (int j = 0; j < TILES; ++j)
#pragma unroll
                for (int p = 0; p < 2; ++p) {
                    const float2 values = state.pair(j, p, h);
                    const int d = 16 * j + column(p);
                    if (whole) to.put(now.b, head + row, d, values.x * by, values.y * by);
                    else *reinterpret_cast<float2*>(part + d) = {values.x * by, values.y * by};
                }
            if (lane % 4 == 0) {
                if (whole) to.put_lse(now.b, head + row, lse2);
                else partial_lse[place + row] = lse2;
            }
        }
        if (!whole) {
            const int last_unit = segment + units_of(now.end, window) - 1;
            const int began = begun ? g : owner_of(start + segment, units, shares);
            const int ends = last_unit < count ? g : owner_of(start + last_unit, units, shares);
            Parts{partial, partial_lse, counters, began, ends, warp}.merge_arrived(g, to, now.b, head, rows);
        }
        segment = unit;
        now.skip(lens, B, window);
    }
}
