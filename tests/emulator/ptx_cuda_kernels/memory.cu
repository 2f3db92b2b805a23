// Locks, address spaces, and CTAs that depend on one another.

using u32 = unsigned int;

__device__ void lock(int* mutex) {
    while (atomicCAS(mutex, 0, 1) != 0) {}
    __threadfence();
}
__device__ void unlock(int* mutex) {
    __threadfence();
    atomicExch(mutex, 0);
}

// One thread of each block adds to what the lock guards.
extern "C" __global__ void guarded_by_a_lock(int* mutex, int* y) {
    if (threadIdx.x == 0) {
        lock(mutex);
        y[0] += blockIdx.x + 1;
        y[1] += 1;
        unlock(mutex);
    }
}

__device__ __noinline__ int add_through(int* p, int v) {
    *p += v;
    return *p;
}

// One pointer, to shared, local or global memory, as each lane's data says.
extern "C" __global__ void generic_pointers(const int* x, int* global_memory, int* y) {
    __shared__ int shared_memory[128];
    const int i = threadIdx.x;
    int own[4] = {100, 200, 300, 400};
    shared_memory[i] = 1000 + i;
    __syncthreads();
    int* p = x[i] % 3 == 0 ? &shared_memory[i] : x[i] % 3 == 1 ? &own[x[i] & 3] : &global_memory[i];
    y[i] = add_through(p, i) + __isShared(p) * 2 + __isLocal(p) * 4 + __isGlobal(p) * 8;
}

// Block `giver` tells the others by st.release; they wait for it by ld.acquire.
extern "C" __global__ void acquire_and_release(int giver, int* box, int* flag, int* y) {
    if (blockIdx.x == giver) {
        box[threadIdx.x] = 7 * threadIdx.x;
        __syncthreads();
        if (threadIdx.x == 0) asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory");
    } else {
        if (threadIdx.x == 0) {
            int seen = 0;
            while (!seen) asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(seen) : "l"(flag) : "memory");
        }
        __syncthreads();
        y[blockIdx.x * blockDim.x + threadIdx.x] = box[threadIdx.x] + blockIdx.x;
    }
}

// All blocks wait for one another, twice.
extern "C" __global__ void grid_barrier(u32* count, int* box, int* y) {
    for (u32 round = 0; round < 2; ++round) {
        box[round * gridDim.x * blockDim.x + blockIdx.x * blockDim.x + threadIdx.x] = threadIdx.x + round;
        __syncthreads();
        if (threadIdx.x == 0) {
            __threadfence();
            atomicAdd(count, 1);
            while (*(volatile u32*)count < (round + 1) * gridDim.x) {}
            __threadfence();
        }
        __syncthreads();
        const u32 next = (blockIdx.x + 1) % gridDim.x;
        const int v = box[round * gridDim.x * blockDim.x + next * blockDim.x + threadIdx.x];
        y[(round * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x] = v * (blockIdx.x + 1);
    }
}

// Many volatile loads in a row, each of another place: nobody waits for anything.
extern "C" __global__ void long_sum(volatile int* x, int* y, int n) {
    int sum = 0;
    for (int k = 0; k < n; ++k) sum += x[k];
    y[threadIdx.x] = sum;
}
