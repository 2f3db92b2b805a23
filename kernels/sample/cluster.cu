// A row lies in the shared memory of CLUSTER CTAs, which find its thresholds and ties there and run the race.
//
// CUDA C++, compiled per config by macros: CLUSTER, THREADS, ELEMENT (4: fp32, 2: bf16, 1: fp16), BYTES of a load, EDITS
// (1: there may be edits or a mask), TOP_N.  In this order: loads and keys, sums over a cluster in a fixed order, the
// search of a threshold, ties, and the kernel.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "hopper.h"

using i64 = long long;

#if ELEMENT == 4
using T = float;
#elif ELEMENT == 2
using T = __nv_bfloat16;
#else
using T = __half;
#endif
constexpr int VECTOR = BYTES / (int)sizeof(T);
constexpr int UNROLL = 4;
constexpr int WARPS = THREADS / 32;
constexpr int CUTS = 7;       // thresholds that a pass compares with
constexpr int SEGMENT = 128;  // the most tokens between two thresholds that a warp holds
constexpr int FEW = 128;      // tokens of a row at which the search ends and compares each with each
#define NEVER __int_as_float(0xff800000)
#define LARGEST 3.4028234663852886e38f

struct alignas(BYTES) Vector { T value[VECTOR]; };

__device__ __forceinline__ Vector load(const T* from) {
    Vector vector;
#if BYTES == 16
    uint4& raw = reinterpret_cast<uint4&>(vector);
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w) : "l"(from) : "memory");
#else
    vector = *reinterpret_cast<const Vector*>(from);
#endif
    return vector;
}

// NaN becomes -inf and +inf the largest float, so that a row without a law gives a token of the vocabulary.
__device__ __forceinline__ float lawful(float x) { return x == x ? fminf(x, LARGEST) : NEVER; }

// A key has the order of its float; both zeros have one key.
__device__ __forceinline__ u32 to_key(float x) {
    const u32 bits = __float_as_uint(x == 0.f ? 0.f : x);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_key(u32 key) {
    return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key);
}

// A weight below 2**-126 is 0; keeping it takes 3 more instructions and a branch for each logit (read in the SASS).
__device__ __forceinline__ float weigh(float x, float best, float rate) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"((x - best) * rate));
    return power;
}

#if CLUSTER > 1
__device__ __forceinline__ void barrier() { cluster_barrier(); }
__device__ __forceinline__ float load_cluster(const float* mine, u32 rank) {
    return load_cluster(shared_address(mine), rank);
}
#else
__device__ __forceinline__ void barrier() { __syncthreads(); }
__device__ __forceinline__ float load_cluster(const float* mine, u32) { return *mine; }
#endif

struct Shared {
    float warps[WARPS][8], cta[2][8], total[8];
    float segment[WARPS][SEGMENT], list[FEW], found[FEW], weight[FEW];
    float length;  // length of list
    int lengths[WARPS];
};

// Sums or maxima over the cluster, in a fixed order; every thread gets them.  `turn` tells apart two calls in a row: no
// thread can be more than one cluster barrier ahead.
template <bool MAX, int N> __device__ __forceinline__ void combine(Shared& shared, int& turn, float (&value)[N]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int step = 16; step; step /= 2) {
            const float other = __shfl_xor_sync(~0u, value[n], step);
            value[n] = MAX ? fmaxf(value[n], other) : value[n] + other;
        }
        if (lane == 0) shared.warps[warp][n] = value[n];
    }
    __syncthreads();
    float sum = MAX ? NEVER : 0.f;
    if (threadIdx.x < N) {
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float other = shared.warps[w][threadIdx.x];
            sum = MAX ? fmaxf(sum, other) : sum + other;
        }
        shared.cta[turn][threadIdx.x] = sum;
    }
    if (CLUSTER > 1) {
        barrier();
        if (threadIdx.x < N) {
            sum = MAX ? NEVER : 0.f;
#pragma unroll
            for (int rank = 0; rank < CLUSTER; ++rank) {
                const float other = load_cluster(&shared.cta[turn][threadIdx.x], rank);
                sum = MAX ? fmaxf(sum, other) : sum + other;
            }
        }
    }
    if (threadIdx.x < N) shared.total[threadIdx.x] = sum;
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N; ++n) value[n] = shared.total[n];
    turn ^= 1;
}

// A thread's view of its row.
struct Row {
    const float4* four;  // this CTA's part, -inf past its end
    int groups, first;   // groups of four; the part's first token
    float best, least, rate;
};

// Gives each token of this thread to `take`, with its id.
template <class F> __device__ __forceinline__ void each(const Row& row, F take) {
    for (int i = threadIdx.x; i < row.groups; i += THREADS) {
        const float4 x = row.four[i];
#pragma unroll
        for (int j = 0; j < 4; ++j) take(j == 0 ? x.x : j == 1 ? x.y : j == 2 ? x.z : x.w, row.first + 4 * i + j);
    }
}

// Keeps of the row, or of what this warp held before (held >= 0), the tokens in (low, high] in the warp's segment, in
// their order.  Held is then their number, or -1 where they do not fit in some warp; returns that of the cluster.
__device__ __forceinline__ int keep(Shared& shared, int& turn, const Row& row, float low, float high, int& held) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* segment = shared.segment[warp];
    int kept = 0;
    auto take = [&](float one, bool real) {
        const bool in = real && one > low && one <= high;
        const u32 lanes = __ballot_sync(~0u, in);
        const int place = kept + __popc(lanes & ((1u << lane) - 1));
        if (in && place < SEGMENT) segment[place] = one;
        kept += __popc(lanes);
    };
    if (held < 0) {
        for (int i = threadIdx.x; i - lane < row.groups; i += THREADS) {
            const bool real = i < row.groups;
            const float4 x = real ? row.four[i] : make_float4(NEVER, NEVER, NEVER, NEVER);
            take(x.x, real), take(x.y, real), take(x.z, real), take(x.w, real);
        }
    } else {
        for (int i = lane; i - lane < held; i += 32) {
            const float one = i < held ? segment[i] : NEVER;
            __syncwarp();  // all lanes have read before one writes to a place before theirs
            take(one, i < held);
        }
    }
    float sums[2] = {lane == 0 ? (float)kept : 0.f, lane == 0 && kept > SEGMENT ? 1.f : 0.f};
    if (lane == 0) shared.lengths[warp] = kept;
    combine<false>(shared, turn, sums);
    held = sums[1] > 0.f ? -1 : kept;
    return (int)sums[0];
}

// Collects in `found` the tokens that the cluster's warps hold, at most FEW, in the same order in every CTA.
__device__ __forceinline__ void share_held(Shared& shared, int held) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int offset = 0, length = 0;
    for (int w = 0; w < WARPS; ++w) {
        offset += w < warp ? shared.lengths[w] : 0;
        length += shared.lengths[w];
    }
    for (int i = lane; i < held; i += 32) shared.list[offset + i] = shared.segment[warp][i];
    if (threadIdx.x == 0) shared.length = (float)length;
    barrier();
    int start = 0;
    for (int rank = 0; rank < CLUSTER; ++rank) {
        const int count = (int)load_cluster(&shared.length, rank);
        if (threadIdx.x < count) shared.found[start + threadIdx.x] = load_cluster(&shared.list[threadIdx.x], rank);
        start += count;
    }
    barrier();  // the lists may be written again
}

// The least value with less than `limit` above it, in tokens or in mass; `all` is the number or the mass of the row.
// Two passes over the row leave so few tokens that the warps hold them, and the next passes read nothing else.
__device__ __forceinline__ float find_cut(Shared& shared, int& turn, const Row& row, bool by_mass, float limit,
                                          float all) {
    float high = row.best, low = from_key(to_key(row.least) - 1), above_high = 0.f, above_low = all;
    // exp(-24) of the largest weight: a million times less than what a vocabulary needs to matter.
    const float start = by_mass ? fmaxf(low, row.best - 34.f / row.rate) : low;
    int held = -1;
    for (int round = 0;; ++round) {
        const u32 top = to_key(high), bottom = to_key(low);
        if (top - bottom <= 1) return high;
        if (held >= 0 || (by_mass ? round > 1 : above_low - above_high <= CLUSTER * WARPS * SEGMENT / 2)) {
            const int n = keep(shared, turn, row, low, high, held);
            if (held >= 0 && n <= FEW) {
                share_held(shared, held);
                const float own = threadIdx.x < n ? shared.found[threadIdx.x] : NEVER;
                if (threadIdx.x < n) shared.weight[threadIdx.x] = by_mass ? weigh(own, row.best, row.rate) : 1.f;
                __syncthreads();
                float sum = above_high;
                for (int i = 0; i < n && threadIdx.x < n; ++i)
                    sum += shared.found[i] > own ? shared.weight[i] : 0.f;
                float cut[1] = {threadIdx.x < n && sum < limit ? -own : NEVER};
                combine<true>(shared, turn, cut);
                return cut[0] == NEVER ? high : -cut[0];
            }
        }
        float cuts[CUTS], above[CUTS] = {};
        const float width = high - low;
        const float guess = high - width * ((limit - above_high) / (above_low - above_high));
#pragma unroll
        for (int c = 0; c < CUTS; ++c) {
            const int off = c < 3 ? 3 - c : c - 3;
            const float far = off == 0 ? 0.f : off == 1 ? 1.f / 64 : off == 2 ? 1.f / 16 : 0.25f;
            const float step = c < 3 ? -far : far;
            cuts[c] = round == 0  ? row.best - (row.best - start) * ((7 - c) / 8.f)
                      : round < 4 ? fminf(fmaxf(guess + width * step, low), high)
                                  : from_key(bottom + (u32)(((u64)(top - bottom) * (c + 1)) >> 3));
        }
        auto count = [&](float one, float weight) {
#pragma unroll
            for (int c = 0; c < CUTS; ++c)
                if (one > cuts[c]) above[c] += weight;
        };
        if (held < 0) {
            for (int i = threadIdx.x; i < row.groups; i += THREADS) {
                const float4 x = row.four[i];
                float4 weight = make_float4(1.f, 1.f, 1.f, 1.f);
                if (by_mass)
                    weight = make_float4(weigh(x.x, row.best, row.rate), weigh(x.y, row.best, row.rate),
                                         weigh(x.z, row.best, row.rate), weigh(x.w, row.best, row.rate));
                count(x.x, weight.x), count(x.y, weight.y), count(x.z, weight.z), count(x.w, weight.w);
            }
        } else {
            for (int i = threadIdx.x % 32; i < held; i += 32) {
                const float one = shared.segment[threadIdx.x / 32][i];
                count(one, by_mass ? weigh(one, row.best, row.rate) : 1.f);
            }
        }
        combine<false>(shared, turn, above);
        const float more = held < 0 ? 0.f : above_high;  // for tokens that no warp holds any more
        const float before = high;
#pragma unroll
        for (int c = 0; c < CUTS; ++c) {
            above[c] += cuts[c] < before ? more : 0.f;
            if (above[c] >= limit && cuts[c] > low) low = cuts[c], above_low = above[c];
            if (above[c] < limit && cuts[c] < high) high = cuts[c], above_high = above[c];
        }
    }
}

// Counts over the row the tokens above the cut, their mass, and the tokens equal to the cut.
__device__ __forceinline__ void tail_of(Shared& shared, int& turn, const Row& row, float cut, float (&sums)[3]) {
    sums[0] = sums[1] = sums[2] = 0.f;
    each(row, [&](float one, int) {
        if (one > cut) sums[0] += 1.f, sums[1] += weigh(one, row.best, row.rate);
        if (one == cut) sums[2] += 1.f;
    });
    combine<false>(shared, turn, sums);
}

// The last of the first `wanted` (> 0) tokens that are equal to the cut, in the order of their ids.
__device__ __forceinline__ float last_tie(Shared& shared, int& turn, const Row& row, float cut, int wanted, u32 rank) {
    float counts[8] = {};
    for (int i = threadIdx.x; i < row.groups; i += THREADS) {
        const float4 x = row.four[i];
        const float ties = (float)((x.x == cut) + (x.y == cut) + (x.z == cut) + (x.w == cut));
#pragma unroll
        for (int r = 0; r < CLUSTER; ++r) counts[r] += r == rank ? ties : 0.f;
    }
    combine<false>(shared, turn, counts);
    int before = 0;
    for (int r = 0; r < CLUSTER; ++r) before += r < rank ? (int)counts[r] : 0;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float last[1] = {NEVER};
    for (int base = 0; base < row.groups; base += THREADS) {
        const int i = base + threadIdx.x;
        const float4 x = i < row.groups ? row.four[i] : make_float4(NEVER, NEVER, NEVER, NEVER);
        const int own = i < row.groups ? (x.x == cut) + (x.y == cut) + (x.z == cut) + (x.w == cut) : 0;
        int scan = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, scan, step);
            scan += lane >= step ? other : 0;
        }
        if (lane == 31) shared.lengths[warp] = scan;
        __syncthreads();
        int rank_of = before + scan - own;
        for (int w = 0; w < WARPS; ++w) {
            rank_of += w < warp ? shared.lengths[w] : 0;
            before += shared.lengths[w];
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float one = j == 0 ? x.x : j == 1 ? x.y : j == 2 ? x.z : x.w;
            if (i < row.groups && one == cut && ++rank_of == wanted) last[0] = (float)(row.first + 4 * i + j);
        }
    }
    combine<true>(shared, turn, last);
    return last[0];
}

// The largest and the least finite value of a row.
__device__ __forceinline__ void extremes(Shared& shared, int& turn, Row& row) {
    float ends[2] = {NEVER, NEVER};
    each(row, [&](float one, int) {
        ends[0] = fmaxf(ends[0], one);
        ends[1] = fmaxf(ends[1], one > NEVER ? -one : NEVER);
    });
    combine<true>(shared, turn, ends);
    row.best = ends[0], row.least = -ends[1];
}

// log E, E = -log1p(-u): see `log_exponential` of bisect.
__device__ __forceinline__ float uniform(u32 word) {
    return fminf(__fadd_rn(__fmul_rn((float)word, 0x1p-32f), 0x1p-33f), 0.999999940395355224609375f);
}

__device__ __forceinline__ uint4 philox(u64 seed, u32 position, u32 block) {
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32), c0 = position, c1 = block, c2 = 0, c3 = 0;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u32 high0 = __umulhi(c0, 0xD2511F53u), low0 = c0 * 0xD2511F53u;
        const u32 high1 = __umulhi(c2, 0xCD9E8D57u), low1 = c2 * 0xCD9E8D57u;
        c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return make_uint4(c0, c1, c2, c3);
}

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(THREADS, TOP_N > 0 ? 1 : 2)
sample(const T* logits, const float* temperatures, const int* top_ks, const float* top_ps, const float* min_ps,
       const i64* seeds, const i64* positions, const float* repetition, const float* presence, const float* frequency,
       const int* offsets, const int* ids, const int* counts, const float* bias, const u32* allowed_bits,
       i64* tokens, i64* logprob_ids, float* logprobs, int V, int share, i64 stride) {
    extern __shared__ float4 four[];
    __shared__ Shared shared;
    float* row_values = reinterpret_cast<float*>(four);
    const u32 rank = blockIdx.x % CLUSTER;
    const i64 b = blockIdx.x / CLUSTER;
    const T* from = logits + b * stride;
    int turn = 0;
    Row row;
    row.four = four, row.groups = share / 4, row.first = rank * share, row.rate = 1.4426950408889634f;
    const int length = max(0, min(share, V - row.first)), vectors = length / VECTOR;
    for (int i = threadIdx.x; i < vectors; i += UNROLL * THREADS) {
        Vector held[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (i + u * THREADS < vectors) held[u] = load(from + row.first + (i + u * THREADS) * VECTOR);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (i + u * THREADS < vectors)
#pragma unroll
                for (int v = 0; v < VECTOR; ++v)
                    row_values[(i + u * THREADS) * VECTOR + v] = lawful(static_cast<float>(held[u].value[v]));
    }
    for (int i = vectors * VECTOR + threadIdx.x; i < share; i += THREADS)
        row_values[i] = i < length ? lawful(static_cast<float>(from[row.first + i])) : NEVER;
    __syncthreads();

#if TOP_N >= 0
    // For the given logits: their sum, and the likeliest tokens, in the order of value and id.
    extremes(shared, turn, row);
    const float raw_best = row.best;
    float all[3];
    tail_of(shared, turn, row, NEVER, all);
    const float log_sum = logf(all[1]);
#if TOP_N > 0
    float cut_n = NEVER, last_n = 0.f;
    if (all[0] > TOP_N) {
        cut_n = find_cut(shared, turn, row, false, (float)TOP_N, all[0]);
        float sums[3];
        tail_of(shared, turn, row, cut_n, sums);
        last_n = last_tie(shared, turn, row, cut_n, TOP_N - (int)sums[0], rank);
    } else if (all[0] < TOP_N)
        last_n = last_tie(shared, turn, row, NEVER, TOP_N - (int)all[0], rank);
    if (threadIdx.x == 0) shared.lengths[0] = 0;
    __syncthreads();
    each(row, [&](float one, int id) {
        if (one > cut_n || (one == cut_n && id <= last_n && all[0] != TOP_N)) {
            const int place = atomicAdd(&shared.lengths[0], 1);
            shared.list[place] = one, shared.list[TOP_N + place] = (float)id;
        }
    });
    __syncthreads();
    if (threadIdx.x == 0) shared.length = (float)shared.lengths[0];
    barrier();
    if (rank == 0) {
        int start = 0;
        for (int r = 0; r < CLUSTER; ++r) {
            const int count = (int)load_cluster(&shared.length, r);
            if (threadIdx.x < count) {
                shared.found[start + threadIdx.x] = load_cluster(&shared.list[threadIdx.x], r);
                shared.weight[start + threadIdx.x] = load_cluster(&shared.list[TOP_N + threadIdx.x], r);
            }
            start += count;
        }
        __syncthreads();
        if (threadIdx.x < TOP_N) {
            const float own = shared.found[threadIdx.x], id = shared.weight[threadIdx.x];
            int place = 1;
            for (int i = 0; i < TOP_N; ++i)
                place += shared.found[i] > own || (shared.found[i] == own && shared.weight[i] < id);
            logprob_ids[b * (1 + TOP_N) + place] = (i64)id;
            logprobs[b * (1 + TOP_N) + place] = own - raw_best - log_sum;
        }
    }
    barrier();
#endif
#endif

#if EDITS
    if (offsets)
        for (int e = offsets[b] + threadIdx.x; e < offsets[b + 1]; e += THREADS) {
            const int at = ids[e] - row.first, count = counts[e];
            if (at < 0 || at >= length) continue;
            float x = __fadd_rn(row_values[at], bias[e]);
            if (count >= 0 && repetition) x = x > 0.f ? __fdiv_rn(x, repetition[b]) : __fmul_rn(x, repetition[b]);
            if (count > 0)
                x = __fsub_rn(x, __fadd_rn(frequency ? __fmul_rn(frequency[b], (float)count) : 0.f,
                                           presence ? presence[b] : 0.f));
            row_values[at] = lawful(x);
        }
    __syncthreads();
    if (allowed_bits)
        for (int i = threadIdx.x; i < row.groups; i += THREADS) {
            const int id = row.first + 4 * i;
            if (id >= V) break;
            const u32 bits = allowed_bits[b * ((V + 31) / 32) + id / 32] >> (id % 32);
            float4 x = four[i];
            x.x = bits & 1 ? x.x : NEVER, x.y = bits & 2 ? x.y : NEVER;
            x.z = bits & 4 ? x.z : NEVER, x.w = bits & 8 ? x.w : NEVER;
            four[i] = x;
        }
    __syncthreads();
#endif

    extremes(shared, turn, row);
    const float temperature = temperatures[b];
    const int top_k = top_ks[b];
    const float top_p = top_ps[b], min_p = min_ps[b];
    const bool draws = temperature > 0.f && row.best > NEVER;
    float cut = NEVER, last = -1.f, least_weight = 0.f;
    if (draws) {
        row.rate = fminf(__fdiv_rn(1.4426950408889634f, temperature), LARGEST);
        least_weight = min_p;
        float sums[3] = {};
        const bool by_count = top_k > 0 && top_k < V;
        if (by_count || top_p < 1.f) tail_of(shared, turn, row, NEVER, sums);
        float kept = sums[1], ties = 0.f, wanted = 0.f;
        // First by count, then by mass in the rest: one piece of code for both.
        for (int by_mass = 0; by_mass < 2; ++by_mass) {
            if (by_mass ? top_p >= 1.f : !by_count || sums[0] <= top_k) continue;
            const float limit = by_mass ? top_p * kept : (float)top_k;
            if (!by_mass || cut == NEVER || sums[1] >= limit) {
                const float all = by_mass && cut > NEVER ? sums[1] : by_mass ? kept : sums[0];
                if (by_mass && cut > NEVER) row.least = from_key(to_key(cut) + 1);
                cut = find_cut(shared, turn, row, by_mass, limit, all);
                tail_of(shared, turn, row, cut, sums);
                ties = wanted = sums[2];
            }
            if (!by_mass) {
                wanted = top_k - sums[0];
                kept = sums[1] + wanted * weigh(cut, row.best, row.rate);
            } else
                wanted = fminf(wanted, fmaxf(ceilf((limit - sums[1]) / weigh(cut, row.best, row.rate)), 1.f));
        }
        if (cut > NEVER) last = wanted < ties ? last_tie(shared, turn, row, cut, (int)wanted, rank) : (float)V;
    }

    // E is at least u, so a token whose u is above its weight times exp(-record) loses, and takes no logarithm.
    // The 1% is far more than the errors of both exponentials; a weight that is 0 has no chance against the best token.
    float score[1] = {NEVER}, token[1] = {NEVER}, bound = -NEVER;
    const u32 position = (u32)positions[b];
    const u64 seed = (u64)seeds[b];
    for (int i = threadIdx.x; i - (int)(threadIdx.x % 32) < row.groups; i += THREADS) {
        const bool real = i < row.groups;
        const float4 x = four[real ? i : 0];
        const int id = row.first + 4 * i;
        u32 kept = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float one = j == 0 ? x.x : j == 1 ? x.y : j == 2 ? x.z : x.w;
            if (draws ? one > cut || (one == cut && (float)(id + j) <= last) : one == row.best && id + j < V)
                kept |= 1u << j;
        }
        kept = real ? kept : 0;
        if (!__any_sync(~0u, kept)) continue;
        float u[4];
        if (draws && kept) {
            const uint4 words = philox(seed, position, id / 4);
            u[0] = uniform(words.x), u[1] = uniform(words.y), u[2] = uniform(words.z), u[3] = uniform(words.w);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float one = j == 0 ? x.x : j == 1 ? x.y : j == 2 ? x.z : x.w;
                const float weight = weigh(one, row.best, row.rate);
                if (weight < least_weight || u[j] > weight * bound) kept &= ~(1u << j);
            }
        }
        if (!__any_sync(~0u, kept)) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float one = j == 0 ? x.x : j == 1 ? x.y : j == 2 ? x.z : x.w;
            if (!(kept >> j & 1)) continue;
            const float own = draws ? __fdiv_rn(one - row.best, temperature) - logf(-log1pf(-u[j])) : 0.f;
            if (own > score[0]) score[0] = own, token[0] = -(float)(id + j);
        }
        float record = score[0];
#pragma unroll
        for (int step = 16; step; step /= 2) record = fmaxf(record, __shfl_xor_sync(~0u, record, step));
        bound = 1.01f * __expf(-record);
    }
    const float mine = score[0];
    combine<true>(shared, turn, score);
    token[0] = mine == score[0] ? token[0] : NEVER;
    combine<true>(shared, turn, token);
    if (rank == 0 && threadIdx.x == 0) {
        const int drawn = token[0] > NEVER ? (int)-token[0] : 0;
        tokens[b] = drawn;
#if TOP_N >= 0
        logprob_ids[b * (1 + TOP_N)] = drawn;
        logprobs[b * (1 + TOP_N)] = lawful(static_cast<float>(from[drawn])) - raw_best - log_sum;
#endif
    }
    // No CTA exits while another CTA reads its memory.
    if (CLUSTER > 1) barrier();
}
