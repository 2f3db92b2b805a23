// Faults around wgmma that were reported in public, or planted in public tests; without the fault if MENDED.
#define WGMMA_N 8
#define WGMMA_TYPES "k16.f32.bf16.bf16"
#define WGMMA_LAYOUT ", 0, 0"
#include "bulk.h"
#include "wgmma.h"

using u16 = unsigned short;
constexpr int A = 64 * 16, B = 8 * 16;
#define KERNEL extern "C" __global__ void

// A tile of matrices of 8 rows of 16 bytes, which lie one behind the other: two along K, then the next 8 rows.
__device__ __forceinline__ u64 tile_of(const void* p) { return shared_address(p) >> 4 | 8ull << 16 | 16ull << 32; }

// Starts the product of two tiles; `settle` waits for it.
__device__ __forceinline__ void start(float (&d)[4], const u16* a, const u16* b) {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    multiply(d, tile_of(a), tile_of(b), 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void store(float* to, const float (&d)[4]) {
    for (int i = 0; i < 4; ++i) to[threadIdx.x * 4 + i] = d[i];
}

// The tile of b is changed in shared memory, and multiplied.
KERNEL changed_operand(float* to, const u16* from) {
    __shared__ alignas(128) u16 a[A], b[B];
    for (int i = threadIdx.x; i < A; i += 128) a[i] = from[i];
    fence_async();
    b[threadIdx.x] = from[threadIdx.x] + 1;
    if (MENDED) fence_async();
    __syncthreads();
    float d[4];
    start(d, a, b);
    settle(d);
    store(to, d);
}

// The tile of a is widened from codes of a byte, and multiplied.
KERNEL widened_operand(float* to, const unsigned char* from) {
    __shared__ alignas(128) u16 a[A], b[B];
    b[threadIdx.x] = from[threadIdx.x];
    fence_async();
    for (int i = threadIdx.x; i < A; i += 128) a[i] = from[i] << 8;
    if (MENDED) fence_async();
    __syncthreads();
    float d[4];
    start(d, a, b);
    settle(d);
    store(to, d);
}

// Two warpgroups multiply one tile of a, which all threads write anew in the next round.
KERNEL shared_operand(float* to, const u16* from) {
    __shared__ alignas(128) u16 a[A], b[2][B];
    b[threadIdx.x / 128][threadIdx.x % 128] = from[threadIdx.x];
    float d[4];
    for (int round = 0; round < 2; ++round) {
        for (int i = threadIdx.x; i < A; i += 256) a[i] = from[i + round];
        fence_async();
        __syncthreads();
        start(d, a, b[threadIdx.x / 128]);
        settle(d);
        if (MENDED) __syncthreads();
    }
    store(to, d);
}

// A warp loads both tiles by TMA, and a warpgroup multiplies them.  It waits for a too late, or for b never.
template <bool LATE, bool NEVER>
__device__ __forceinline__ void loaded_product(float* to, const u16* from) {
    __shared__ alignas(128) u16 a[A], b[B];
    __shared__ u64 bars[2];
    const u32 full_a = shared_address(bars), full_b = full_a + 8;
    if (threadIdx.x == 0) {
        init(full_a, 1);
        init(full_b, 1);
        publish_inits();
    }
    __syncthreads();
    if (threadIdx.x == 128) {
        load_bulk(a, from, sizeof a, full_a);
        load_bulk(b, from, sizeof b, full_b);
        wait(full_a, 0);  // its CTA must not end before its copies
        wait(full_b, 0);
    } else if (threadIdx.x < 128) {
        float d[4];
        if (!LATE) wait(full_a, 0);
        if (!NEVER) wait(full_b, 0);
        start(d, a, b);
        if (LATE) wait(full_a, 0);
        settle(d);
        store(to, d);
    }
}
KERNEL late_wait(float* to, const u16* from) { loaded_product<!MENDED, false>(to, from); }
KERNEL missing_wait(float* to, const u16* from) { loaded_product<false, !MENDED>(to, from); }
