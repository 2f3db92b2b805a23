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

__device__ int nested_case(int v, int lane) {
    for (int a = 0; a < lane % 4; ++a) {
        for (int b = 0; b < v % 3; ++b) {
            if ((a + b) & 1) continue;
            v += b + 1;
            if (v > 100) return v - 100;
        }
        v += 2;
    }
    return v;
}

extern "C" __global__ void nested(const int* x, int* y) {
    y[threadIdx.x] = nested_case(x[threadIdx.x], threadIdx.x & 31);
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

// Each half of the warp shuffles by itself, on its own way through the code.
extern "C" __global__ void partial_shuffles(const int* x, int* y) {
    const int i = threadIdx.x, lane = i & 31;
    int v = x[i];
    if (lane < 16) {
        for (int step = 8; step; step /= 2) v += __shfl_xor_sync(0x0000ffffu, v, step, 16);
    } else {
        v = __shfl_up_sync(0xffff0000u, v, 1, 16);
        v -= __shfl_sync(0xffff0000u, v, 5, 16);
    }
    y[i] = v;
}

// (n, 4): ballot, any, all, and who has the same value.
extern "C" __global__ void votes(const int* x, u32* y) {
    const int i = threadIdx.x;
    const int v = x[i];
    y[4 * i] = __ballot_sync(ALL, v > 0);
    y[4 * i + 1] = __any_sync(ALL, v == 7);
    y[4 * i + 2] = __all_sync(ALL, v < 40);
    y[4 * i + 3] = __match_any_sync(ALL, v % 5);
}

// (n, 5): reductions by redux over the lanes that have one key: several masks in one instruction.
extern "C" __global__ void keyed_reductions(const int* keys, const int* x, int* y) {
    const int i = threadIdx.x;
    const u32 same = __match_any_sync(ALL, keys[i]);
    y[5 * i] = __reduce_add_sync(same, x[i]);
    y[5 * i + 1] = __reduce_min_sync(same, x[i]);
    y[5 * i + 2] = __reduce_max_sync(same, x[i]);
    y[5 * i + 3] = __reduce_xor_sync(same, (u32)x[i]);
    y[5 * i + 4] = __shfl_sync(same, x[i], __ffs(same) - 1) + __popc(__ballot_sync(same, x[i] & 1));
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
