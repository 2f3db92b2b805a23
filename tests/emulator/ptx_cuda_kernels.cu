// What only a compiler's own code shows: lines of the source, lanes that part, locks, pointers, CTAs that wait.

using u32 = unsigned int;

// The tests look for a line by the words behind its statement.
extern "C" __global__ void copy(const float* x, float* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i];  // the copy
}

extern "C" __global__ void asserts(const int* x) {
    assert(x[threadIdx.x] < 5);  // the assertion
}

// Lanes that leave early must not be waited for by what comes after.
extern "C" __global__ void early_return(const int* x, int* y, int n) {
    __shared__ int sums[4];
    const int i = threadIdx.x;
    if (i >= n) return;
    const u32 members = __ballot_sync(__activemask(), 1);
    int v = x[i];
    for (int step = 16; step; step /= 2) {
        const int other = __shfl_down_sync(members, v, step);
        if ((i & 31) + step < 32 && i + step < n) v += other;
    }
    if ((i & 31) == 0) sums[i / 32] = v;
    __syncthreads();
    if (i == 0) {
        int total = 0;
        for (int w = 0; w * 32 < n; ++w) total += sums[w];
        *y = total;
    }
}

// A value handed from lane to lane through shared memory: __syncwarp orders them, though the lanes part between.
extern "C" __global__ void sync_warp(int* y) {
    __shared__ int box[128];
    const int i = threadIdx.x, lane = i & 31;
    box[i] = lane;
    __syncwarp();
    for (int round = 0; round < 5; ++round) {
        int v;
        if (lane & 1) v = box[i - 1] + 1; else v = box[i + 1] * 2;
        __syncwarp();
        if (lane < 16) box[i] = v; else box[i] = v + 1;
        __syncwarp();
    }
    y[i] = box[i];
}

// Lane 0 of each warp sets what the others of its warp wait for: needs lanes that go on by themselves.
extern "C" __global__ void spin_within_a_warp(volatile int* flags, int* y) {
    const int i = threadIdx.x, w = i / 32;
    if ((i & 31) == 0) {
        flags[w] = 41 + w;
    } else {
        while (flags[w] == 0) {}
    }
    __syncwarp();
    y[i] = flags[w] + 1;
}

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
