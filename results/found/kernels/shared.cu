// Faults of shared memory that were reported in public, each in a few lines of our own; without the fault if MENDED.
#include "bulk.h"

constexpr int N = 128;
#define KERNEL extern "C" __global__ void

// The state of a sequence is written by all threads, and stored by TMA.
KERNEL state_store(float* to, const float* from) {
    __shared__ alignas(128) float state[N];
    state[threadIdx.x] = from[threadIdx.x];
    if (MENDED) fence_async();
    __syncthreads();
    if (threadIdx.x == 0) store_bulk(to, state, sizeof state);
}

// The fence stands in a loop over tiles, and an empty sequence has no tile.
KERNEL empty_sequence(float* to, const float* from) {
    __shared__ alignas(128) float state[N];
    const int tiles = (int)from[0];
    state[threadIdx.x] = 0;
    if (MENDED) fence_async();
    for (int tile = 0; tile < tiles; ++tile) {
        state[threadIdx.x] += from[tile];
        fence_async();
    }
    __syncthreads();
    if (threadIdx.x == 0) store_bulk(to, state, sizeof state);
}

// An mbarrier is initialised, and TMA completes its bytes.
KERNEL init_then_copy(float* to, const float* from) {
    __shared__ alignas(128) float tile[N];
    __shared__ u64 full;
    const u32 bar = shared_address(&full);
    if (threadIdx.x == 0) {
        init(bar, 1);
        if (MENDED) publish_inits();
        load_bulk(tile, from, sizeof tile, bar);
    }
    __syncthreads();
    wait(bar, 0);
    to[threadIdx.x] = tile[threadIdx.x];
}

// A stage is read by loads, released, and filled again by TMA.
KERNEL reused_stage(float* to, const float* from) {
    __shared__ alignas(128) float stage[N];
    __shared__ u64 full_bar, empty_bar;
    const u32 full = shared_address(&full_bar), empty = shared_address(&empty_bar);
    if (threadIdx.x == 0) {
        init(full, 1);
        init(empty, N);
        publish_inits();
    }
    __syncthreads();
    if (threadIdx.x == N) {
        for (int i = 0; i < 2; ++i) {
            if (i) wait(empty, 0);
            if (i && MENDED) fence_async();
            load_bulk(stage, from + i * N, sizeof stage, full);
        }
    } else if (threadIdx.x < N) {
        float sum = 0;
        for (int i = 0; i < 2; ++i) {
            wait(full, i);
            sum += stage[threadIdx.x];
            arrive(empty);
        }
        to[threadIdx.x] = sum;
    }
}

// All lanes of a warp write, and one lane arrives at the mbarrier on which the readers wait.
KERNEL elected_arrival(float* to, const float* from) {
    __shared__ float weight[32];
    __shared__ u64 loaded;
    const u32 bar = shared_address(&loaded);
    if (threadIdx.x == 0) init(bar, 1);
    __syncthreads();
    if (threadIdx.x < 32) {
        weight[threadIdx.x] = from[threadIdx.x];
        if (MENDED) __syncwarp();
        if (threadIdx.x == 0) arrive(bar);
    } else {
        wait(bar, 0);
        to[threadIdx.x] = weight[threadIdx.x % 32];
    }
}

// Four threads add a row each to global memory by TMA; each row was written by another warp, and is written again.
KERNEL staged_reduction(float* to, const float* from) {
    __shared__ alignas(128) float rows[4][32];
    for (int i = 0; i < 2; ++i) {
        rows[threadIdx.x / 32][threadIdx.x % 32] = from[threadIdx.x];
        fence_async();
        if (MENDED) __syncthreads();
        if (threadIdx.x < 4) add_bulk(to + threadIdx.x * 32, rows[threadIdx.x], sizeof rows[0]);
        if (MENDED) __syncthreads();
    }
}

// A slot is released before its last read, and filled again by TMA.
KERNEL early_release(float* to, const float* from) {
    __shared__ alignas(128) float slot[N];
    __shared__ u64 full_bar, empty_bar;
    const u32 full = shared_address(&full_bar), empty = shared_address(&empty_bar);
    if (threadIdx.x == 0) {
        init(full, 1);
        init(empty, N);
        publish_inits();
    }
    __syncthreads();
    if (threadIdx.x == N) {
        for (int i = 0; i < 2; ++i) {
            if (i) wait(empty, 0);
            load_bulk(slot, from + i * N, sizeof slot, full);
        }
    } else if (threadIdx.x < N) {
        for (int i = 0; i < 2; ++i) {
            wait(full, i);
            const float row_sum = slot[threadIdx.x];
            if (!MENDED) arrive(empty);
            to[i * N + threadIdx.x] = row_sum + slot[threadIdx.x ^ 1];
            if (MENDED) fence_async(), arrive(empty);
        }
    }
}
