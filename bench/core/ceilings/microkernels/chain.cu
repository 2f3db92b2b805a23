// A chain of DEPTH loads, each from an address that the one before gave, and a store: what a kernel of as many dependent
// loads takes at least. A thread goes its own way, 4 bytes beside its neighbour's, and meets no line of memory twice.

extern "C" __global__ void __launch_bounds__(THREADS) chain(const u32* next, u32* ends) {
    u32 at = threadIdx.x;
#pragma unroll
    for (int load = 0; load < DEPTH; ++load) at = next[at];
    ends[threadIdx.x] = at;
}
