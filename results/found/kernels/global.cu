// Faults of global memory: of DataRaceBench's programs for accelerators, and one report; without the fault if MENDED.
#include "bulk.h"

constexpr int N = 128;
#define KERNEL extern "C" __global__ void

// Threads count in one place.  CTAs (DRB144, 151, 164) and warps of one CTA (DRB153, 161) are two launches of it.
KERNEL counter(int* to, const float*) {
    if (MENDED) atomicAdd(to, 1);
    else ++*to;
}

__device__ __forceinline__ void lock(int* at) {
    while (atomicCAS(at, 0, 1) != 0) {}
    __threadfence();
}
__device__ __forceinline__ void unlock(int* at) {
    __threadfence();
    atomicExch(at, 0);
}
// Two locks guard one variable (DRB148).
KERNEL two_locks(int* to, const float*) {
    if (threadIdx.x) return;
    lock(to + 1);
    *to += 1;
    unlock(to + 1);
    int* second = to + (MENDED ? 1 : 2);
    lock(second);
    *to -= 2;
    unlock(second);
}

// A lock orders only the threads of a CTA, and CTAs share it (DRB150).
KERNEL lock_of_a_cta(int* to, const float*) {
    if (threadIdx.x) return;
    while ((MENDED ? atomicCAS(to + 1, 0, 1) : atomicCAS_block(to + 1, 0, 1)) != 0) {}
    if (MENDED) __threadfence();
    else __threadfence_block();
    *to += 1;
    if (MENDED) __threadfence();
    else __threadfence_block();
    if (MENDED) atomicExch(to + 1, 0);
    else atomicExch_block(to + 1, 0);
}

// An element needs the one before it, which another thread writes (DRB026, 156).
KERNEL carried(int* to, const float*) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (!MENDED && i) to[i] = to[i - 1] + 1;
    if (MENDED && !i)
        for (int j = 1; j < N; ++j) to[j] = to[j - 1] + 1;
}

// The same among the lanes of one warp, 16 elements apart (DRB157).
KERNEL carried_by_lanes(int* to, const float*) {
    const int lane = threadIdx.x;
    if (!MENDED) {
        to[lane + 16] = to[lane] + 1;
        return;
    }
    if (lane < 16) to[lane + 16] = to[lane] + 1;
    __syncwarp();
    if (lane >= 16) to[lane + 16] = to[lane] + 1;
}

// CTAs add, and then multiply what other CTAs may still read (DRB116, 160).
KERNEL two_phases(int* to, const float*) {
    int *b = to + 32, *sum = to + 64;
    const int i = blockIdx.x, last = gridDim.x - 1;
    if (threadIdx.x) return;
    sum[i] = b[i] + 2;
    if (MENDED) {
        __threadfence();
        atomicAdd(to, 1);
        while (atomicAdd(to, 0) <= last) {}
        __threadfence();
    }
    b[last - i] = sum[last - i] * 2;
}

// A CTA waits for the flag of another by loads, and copies what it guards by TMA.
KERNEL flag_then_copy(float* to, const float* from) {
    __shared__ alignas(128) float tile[N];
    __shared__ u64 full;
    const u32 bar = shared_address(&full);
    unsigned int* flag = (unsigned int*)(to + 4 * N);
    if (blockIdx.x == 1) {
        to[threadIdx.x] = from[threadIdx.x];
        __syncthreads();
        __threadfence();
        if (threadIdx.x == 0) atomicExch(flag, 1);
        return;
    }
    if (threadIdx.x == 0) {
        init(bar, 1);
        publish_inits();
        while (atomicAdd(flag, 0) == 0) {}
        __threadfence();
        if (MENDED) asm volatile("fence.proxy.async;" ::: "memory");
        load_bulk(tile, to, sizeof tile, bar);
    }
    __syncthreads();
    wait(bar, 0);
    to[2 * N + threadIdx.x] = tile[threadIdx.x];
}
