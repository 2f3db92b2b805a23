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

// Warps part and meet again while a product of ones (64 x 16 and 8 x 16) is in flight.
extern "C" __global__ void around_a_product(float* y, int* counts, int mask) {
    __shared__ __align__(128) unsigned short a[64 * 16], b[8 * 16];
    const int i = threadIdx.x;
    for (int k = i; k < 64 * 16; k += 128) a[k] = 0x3f80;
    b[i] = 0x3f80;
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    // No swizzle: 128 bytes from a core matrix to the next along K, 256 to the next rows.
    const unsigned long long form = 128ull >> 4 << 16 | 256ull >> 4 << 32;
    const unsigned long long left = form | ((unsigned)__cvta_generic_to_shared(a) >> 4 & 0x3fff);
    const unsigned long long right = form | ((unsigned)__cvta_generic_to_shared(b) >> 4 & 0x3fff);
    float d[4] = {};
    int mine = 0;
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %5, 1, 1, 1, 0, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(left), "l"(right));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile(
        "{\n\t.reg .pred p;\n\tsetp.eq.s32 p, %1, 0;\n\t@p bra over;\n\tadd.s32 %0, %0, 7;\n\tover:\n\t}"
        : "+r"(mine) : "r"(mask >> i / 32 & 1));
    asm volatile("wgmma.wait_group.sync.aligned 0;" : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) :: "memory");
    for (int k = 0; k < 4; ++k) y[4 * i + k] = d[k];
    counts[i] = mine;
}
