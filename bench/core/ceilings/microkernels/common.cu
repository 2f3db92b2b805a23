// What every microkernel begins with; put in front of its source, because NVRTC sees one text. All that is written in
// PTX is here or in the instructions that Python names, so that the rest is plain C++.

using u8 = unsigned char;
using u32 = unsigned int;
using u64 = unsigned long long;

// Cycles of this SM and nanoseconds of the device's timer: over a launch their ratio is the clock that the SM held.
struct Clock {
    u64 cycles, nanoseconds;
};

__device__ __forceinline__ Clock now() {
    Clock c;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(c.cycles)::"memory");
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(c.nanoseconds)::"memory");
    return c;
}

__device__ __forceinline__ void keep_clock(Clock* clocks, Clock began) {
    const Clock ended = now();
    if (threadIdx.x == 0) clocks[blockIdx.x] = {ended.cycles - began.cycles, ended.nanoseconds - began.nanoseconds};
}

struct alignas(16) Vector {
    u32 word[4];
};

// Past L1: `cg` caches in L2 only.
__device__ __forceinline__ Vector load_from_l2(const Vector* from) {
    Vector v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(from));
    return v;
}

// Through the read-only path, with nothing kept in L1.
__device__ __forceinline__ Vector load_once(const Vector* from) {
    Vector v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(from));
    return v;
}

__device__ __forceinline__ void store(Vector* to, Vector v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]),
                 "r"(v.word[3])
                 : "memory");
}

__device__ __forceinline__ float fast_exp2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float fast_rsqrt(float x) {
    float y;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Orders ordinary writes to shared memory before the tensor cores' reads of it.
__device__ __forceinline__ void shared_to_tensor_cores() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving accumulators while wgmma writes them: without it, ptxas serializes every wgmma.
template <int COUNT>
__device__ __forceinline__ void hold(float* d) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
