// A warpgroup fills a ring of swizzled tiles with the weight by cp.async, a warp with a, others multiply by wgmma, and a
// cluster adds its sums in shared memory.  Compiled per config by macros.
//
// The loading threads do not multiply: wgmma needs a proxy fence between cp.async and its read of shared memory, and
// this fence would wait for the copies that the same thread has in flight.  Weight loaders do not load a: a thread
// arrives at a barrier when all its copies so far are there, so that in a dependent launch (`lib/pdl.h`), where a comes
// last, the first tile would wait for a whole ring.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#if ELEMENT == 4
using T = float;
#define WGMMA_TYPES "k8.f32.tf32.tf32"
#define WGMMA_LAYOUT ""
#elif ELEMENT == 2
using T = __nv_bfloat16;
#define WGMMA_TYPES "k16.f32.bf16.bf16"
#else
using T = __half;
#define WGMMA_TYPES "k16.f32.f16.f16"
#endif
#ifndef WGMMA_LAYOUT
#define WGMMA_LAYOUT ", 0, 0"  // both operands along K
#endif
#define WGMMA_N BLOCK_M
#include "hopper.h"
#include "pdl.h"
#include "wgmma.h"

using i64 = long long;

// A tile's rows are cut into pieces of 128 bytes, the widest swizzle; one piece of all rows is a block.
constexpr int PIECE = 128 / (int)sizeof(T), VECTOR = 16 / (int)sizeof(T);
constexpr int BLOCK_N = 64 * WARPGROUPS, BLOCK_K = PIECE * PIECES;
// In this order: threads that load the weight, that multiply, and that load a.
constexpr int LOADERS = 128, MULTIPLIERS = 128 * WARPGROUPS, A_LOADERS = 32;
constexpr int THREADS = LOADERS + MULTIPLIERS + A_LOADERS;
constexpr int W_BYTES = BLOCK_N * 128, X_BYTES = BLOCK_M * 128, STAGE_BYTES = (W_BYTES + X_BYTES) * PIECES;
constexpr int PITCH = BLOCK_N + 4;  // row length of the sums: columns of a fragment are 8 banks apart, its rows 1 bank
static_assert(BLOCK_M * PITCH * 4 <= STAGES * STAGE_BYTES, "the sums reuse the ring's memory");
static_assert(PIECES <= 2, "16 threads of a warp at most are side by side along K");

// Rows of 128 bytes, swizzled; 1024 bytes from one group of eight rows to the next.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return (u64)(address >> 4 & 0x3fff) | (u64)1 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// Copies 16 bytes if `wanted`, as one predicated instruction; with `ONCE` L2 evicts them first.
template <bool ONCE>
__device__ __forceinline__ void copy(u32 to, const T* from, int wanted, u64 policy) {
    if (ONCE)
        asm volatile(
            "{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %2, 0;\n\t"
            "@p cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %3;\n\t}" ::"r"(to),
            "l"(from), "r"(wanted), "l"(policy)
            : "memory");
    else
        asm volatile(
            "{\n\t.reg .pred p;\n\tsetp.ne.s32 p, %2, 0;\n\t"
            "@p cp.async.cg.shared.global.L2::128B [%0], [%1], 16;\n\t}" ::"r"(to),
            "l"(from), "r"(wanted)
            : "memory");
}
__device__ __forceinline__ void copy_part(u32 to, const T* from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void arrive_after_copies(u32 bar) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void meet() {
#if SPLIT > 1
    cluster_barrier();
#else
    __syncthreads();
#endif
}

// The tile of one operand, copied by COPIERS threads: each copies the same 16 bytes of every DOWN-th row.
template <int ROWS, int COPIERS, bool ONCE>
struct Copies {
    static constexpr int ACROSS = 8 * PIECES, DOWN = COPIERS / ACROSS, COUNT = (ROWS + DOWN - 1) / DOWN;
    const T* from;
    i64 down;
    int row, count, left;  // count: rows that exist
    u32 to;

    __device__ Copies(const T* operand, i64 stride, int first, int size, int first_k, int K, int thread) {
        const int column = thread % ACROSS, k = first_k + column * VECTOR;
        row = thread / ACROSS;
        left = (K - k) * (int)sizeof(T);
        to = column / 8 * (ROWS * 128) + row * 128 + ((column ^ row) % 8) * 16;
        from = operand + (first + row) * stride + k;
        down = DOWN * stride;
        count = max(0, min(ROWS, size - first) - row + DOWN - 1) / DOWN;
    }

    // The swizzle has a period of eight rows; DOWN is a power of two and `row` below it, so their bits do not meet.
    __device__ __forceinline__ u32 place(u32 tile, int i) const {
        return tile + i * DOWN * 128 + (to ^ i * DOWN % 8 * 16);
    }

    // Rows past the last one stay zero, because no copy writes them.
    __device__ void clear(u32 tile) const {
        for (int i = count; row + i * DOWN < ROWS; ++i)
            asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(place(tile, i)), "r"(0) : "memory");
    }

    // Copies a tile that is inside K, and moves to the next one.
    __device__ __forceinline__ void copy_tile(u32 tile, u64 policy) {
        const T* source = from;
#pragma unroll 8
        for (int i = 0; i < COUNT; ++i, source += down) copy<ONCE>(place(tile, i), source, i < count, policy);
        from += BLOCK_K;
        left -= BLOCK_K * (int)sizeof(T);
    }

    // Copies the last tile, in which the bytes past K become zero.
    __device__ __forceinline__ void copy_last(u32 tile) {
        const T* source = left > 0 ? from : from - BLOCK_K;
#pragma unroll 1
        for (int i = 0; i < count; ++i, source += down)
            copy_part(place(tile, i), source, max(0, min(16, left)));
    }

    // Fills the ring, whose tiles of this operand begin at `tiles`, in `steps` steps; the first `whole` are inside K.
    __device__ __forceinline__ void run(u32 tiles, u32 full, u32 empty, int steps, int whole) {
        u64 policy = 0;
        if (ONCE) asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
        int step = 0, stage = 0;
#pragma unroll 1
        for (; step < min(steps, whole); ++step) {
            if (step >= STAGES) wait(empty + 8 * stage, step / STAGES - 1 & 1);
            copy_tile(tiles + stage * STAGE_BYTES, policy);
            arrive_after_copies(full + 8 * stage);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        if (step < steps) {
            if (step >= STAGES) wait(empty + 8 * stage, step / STAGES - 1 & 1);
            copy_last(tiles + stage * STAGE_BYTES);
            arrive_after_copies(full + 8 * stage);
        }
    }
};

extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
__launch_bounds__(THREADS, WARPGROUPS <= 2 ? 2 : 1)
swap_ab(const T* a, const T* weight, const T* bias, const T* residual, T* out, int M, int N, int K, int steps_a_split,
        i64 stride_a, i64 stride_weight, i64 stride_residual, i64 stride_out) {
    extern __shared__ __align__(1024) unsigned char raw[];
    __shared__ u64 barriers[2 * STAGES];
    const u32 ring = shared_address(raw), full = shared_address(barriers), empty = full + 8 * STAGES;
    const int rank = blockIdx.x % SPLIT, first_n = blockIdx.x / SPLIT * BLOCK_N, first_m = blockIdx.y * BLOCK_M;
    const int first_step = rank * steps_a_split;
    const int steps = max(0, min(steps_a_split, (K + BLOCK_K - 1) / BLOCK_K - first_step));
    const int whole = K / BLOCK_K - first_step;
    const u32 tiles_a = ring + W_BYTES * PIECES;
    const bool multiplies = threadIdx.x >= LOADERS && threadIdx.x < LOADERS + MULTIPLIERS;
    Copies<BLOCK_N, LOADERS, true> of_weight(weight, stride_weight, first_n, N, first_step * BLOCK_K, K, threadIdx.x);
    Copies<BLOCK_M, A_LOADERS, false> of_a(a, stride_a, first_m, M, first_step * BLOCK_K, K, threadIdx.x % A_LOADERS);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            init(full + 8 * s, LOADERS + A_LOADERS);
            init(empty + 8 * s, MULTIPLIERS);
        }
        publish_inits();
    }
    for (int s = 0; s < min(steps, STAGES) && !multiplies; ++s) {
        if (threadIdx.x < LOADERS) of_weight.clear(ring + s * STAGE_BYTES);
        else of_a.clear(tiles_a + s * STAGE_BYTES);
    }
    __syncthreads();

    float d[BLOCK_M / 2] = {};
    if (threadIdx.x < LOADERS) {
        of_weight.run(ring, full, empty, steps, whole);
    } else if (!multiplies) {
        wait_for_kernel_before();
        of_a.run(tiles_a, full, empty, steps, whole);
    } else {
        const u64 w = descriptor(ring + (WARPGROUPS > 1 ? (threadIdx.x - LOADERS) / 128 * (64 * 128) : 0));
        const u64 x = descriptor(tiles_a);
#pragma unroll 1
        for (int step = 0, stage = 0; step < steps; ++step) {
            wait(full + 8 * stage, step / STAGES & 1);
            fence_async();
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            const int at = stage * (STAGE_BYTES / 16);
#pragma unroll
            for (int piece = 0; piece < PIECES; ++piece)
#pragma unroll
                for (int k = 0; k < 4; ++k)
                    multiply(d, w + at + piece * (W_BYTES / 16) + 2 * k, x + at + piece * (X_BYTES / 16) + 2 * k, 1);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
            arrive(empty + 8 * stage);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
    }
    __syncthreads();  // all tiles have been read, so the sums may overwrite them

    float* sums = reinterpret_cast<float*>(raw);
    if (multiplies) {
        const int lane = threadIdx.x % 32, row = (threadIdx.x - LOADERS) / 32 * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < BLOCK_M / 2; ++i)
            sums[(i / 4 * 8 + lane % 4 * 2 + i % 2) * PITCH + row + i / 2 % 2 * 8] = d[i];
    }
    meet();
    wait_for_kernel_before();  // also for threads that did not load a, before they read the residual and write

    // Each CTA of the cluster adds its part of the tile, in the order of the shares of K.
    const int rows = min(BLOCK_M, M - first_m);
    for (int i = rank * THREADS + threadIdx.x; i < rows * BLOCK_N; i += SPLIT * THREADS) {
        const int m = i / BLOCK_N, n = first_n + i % BLOCK_N;
        const float* place = sums + m * PITCH + i % BLOCK_N;
        float total = 0;
#pragma unroll
        for (int other = 0; other < SPLIT; ++other)
            total += SPLIT > 1 ? load_cluster(shared_address(place), other) : *place;
        if (n < N) {
            const i64 at = first_m + m;
            if (bias) total += static_cast<float>(bias[n]);
            if (residual) total += static_cast<float>(residual[at * stride_residual + n]);
            out[at * stride_out + n] = static_cast<T>(total);
        }
    }
#if SPLIT > 1
    meet();  // no CTA exits while another CTA reads its sums
#endif
}
