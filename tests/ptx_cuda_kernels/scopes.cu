// Loads, atomics and fences that are more, or less, than they look to other CTAs.

extern "C" __global__ void plain_and_strong_load(const int* x, int* y) {
    int value;
    if (blockIdx.x == 0) value = x[threadIdx.x];
    else asm volatile("ld.volatile.global.s32 %0, [%1];" : "=r"(value) : "l"(x + threadIdx.x));
    y[blockIdx.x * 32 + threadIdx.x] = value;
}

// CTA 0 only reads the flag: whoever reads it too learns nothing of CTA 0.
extern "C" __global__ void load_as_release(int* data, int* flag, int* y) {
    if (threadIdx.x) return;
    int value;
    if (blockIdx.x == 0) {
        data[0] = 5;
        __threadfence();
        asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag));
        y[0] = value;
    } else {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag));
        y[1] = value + data[0];
    }
}

extern "C" __global__ void counts_within_a_cta(int* count) { atomicAdd_block(count + OWN * blockIdx.x, 1); }

extern "C" __global__ void reads_within_a_cta(int* flag, int* y) {
    if (threadIdx.x) return;
    int value = 0;
    if (blockIdx.x == 0) asm volatile("st.relaxed.cta.global.s32 [%0], %1;" ::"l"(flag), "r"(1) : "memory");
    else asm volatile("ld.relaxed.cta.global.s32 %0, [%1];" : "=r"(value) : "l"(flag));
    y[blockIdx.x] = value;
}

extern "C" __global__ void histogram(const int* x, int* bins) {
    __shared__ int own[32];
    own[threadIdx.x] = 0;
    __syncthreads();
    atomicAdd(own + x[threadIdx.x], 1);
    __syncthreads();
    atomicAdd(bins + threadIdx.x, own[threadIdx.x]);
}

// A bulk store of what the lanes wrote: FENCE says what stands between.
extern "C" __global__ void stores_behind_a_fence(int* y) {
    __shared__ __align__(16) int tile[32];
    tile[threadIdx.x] = threadIdx.x;
    asm volatile(FENCE ::: "memory");
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned from = __cvta_generic_to_shared(tile);
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 128;" ::"l"(y), "r"(from) : "memory");
        asm volatile("cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;" ::: "memory");
    }
}
