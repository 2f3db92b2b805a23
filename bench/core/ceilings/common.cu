// What every microkernel begins with; put in front of its source, because NVRTC sees one text.

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
