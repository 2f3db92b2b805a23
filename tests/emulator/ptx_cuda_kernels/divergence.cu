// Warps whose lanes part and meet again. One block of 128 threads unless its name says otherwise.

using u32 = unsigned int;
constexpr u32 ALL = 0xffffffffu;

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
