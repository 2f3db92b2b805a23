// Keeps Hopper's tensor cores busy with wgmma, with A and B from shared memory.
//
// WGMMA(d, a, b, add) is one instruction, m64nN by 32 bytes of K, made by `compute.py`: a thread's N / 2 accumulators are operands one by one. A block of WARPGROUPS warpgroups holds STAGES
// tiles of a product's K dimension in shared memory, 128 bytes of K each, and goes through them again and again, as the
// main loop of a matrix product does. Accumulators start anew every RESTART passes: fp8's have few bits.

constexpr u32 ROW = 128;  // bytes of K in one stage, and in one row of the 128-byte swizzle
constexpr u32 STEP = 32;  // bytes of K in one instruction, whatever the dtype
constexpr u32 A_STAGE = WARPGROUPS * 64 * ROW, B_STAGE = N * ROW;

// (rows, STAGES * ROW) bytes of global memory into STAGES tiles, in each of which 16-byte pieces trade places by row.
__device__ __forceinline__ void fill(u8* to, const u8* from, u32 rows) {
    constexpr u32 PIECES = STAGES * ROW / 16;
    for (u32 piece = threadIdx.x; piece < rows * PIECES; piece += WARPGROUPS * 128) {
        const u32 row = piece / PIECES, at = piece % PIECES * 16;
        const u32 place = at / ROW * rows * ROW + row * ROW + (at % ROW ^ row % 8 * 16);
        *reinterpret_cast<Vector*>(to + place) = *reinterpret_cast<const Vector*>(from + row * STAGES * ROW + at);
    }
}

// A K-major operand in 128-byte swizzle: start address, 1 for the offset that this swizzle does not use, 1024 bytes
// between groups of 8 rows; address and offsets in units of 16 bytes.
__device__ __forceinline__ u64 descriptor(const u8* tile) {
    const u32 address = u32(__cvta_generic_to_shared(tile));
    return u64(address >> 4) | u64(1) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}

// Fills shared memory with B and A.
__device__ __forceinline__ const u8* prepare(const u8* a, const u8* b) {
    extern __shared__ __align__(1024) u8 shared[];
    fill(shared, b, N);
    fill(shared + STAGES * B_STAGE, a, WARPGROUPS * 64);
    // Orders these ordinary writes to shared memory before the tensor cores' reads of it.
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    return shared;
}

// Keeps the compiler from moving accumulators while wgmma writes them: without it, ptxas serializes every wgmma.
__device__ __forceinline__ void hold(float* d) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

template <typename Product>
__device__ __forceinline__ void work(float* sums, Clock* clocks, u32 passes, Product product) {
    float d[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) d[i] = 0.f;
    const Clock began = now();
#pragma unroll 1
    for (u32 pass = 0; pass < passes; ++pass) {
        hold(d);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        product(d, pass % RESTART);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        hold(d);
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    hold(d);
    keep_clock(clocks, began);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) sum += d[i];
    sums[blockIdx.x * (WARPGROUPS * 128) + threadIdx.x] = sum;
}

// sums: of each thread's accumulators. a: (WARPGROUPS * 64, STAGES * 128 bytes); b: (N, STAGES * 128 bytes).
extern "C" __global__ void __launch_bounds__(WARPGROUPS * 128, 1)
wgmma_products(const u8* a, const u8* b, float* sums, Clock* clocks, u32 passes) {
    const u8* shared = prepare(a, b);
    // From lane 0, so that the compiler knows the descriptor to be the same in all lanes.
    const u32 warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    const u64 b_tiles = descriptor(shared);
    const u64 a_tiles = descriptor(shared + STAGES * B_STAGE + warpgroup * 64 * ROW);
    work(sums, clocks, passes, [&](float* d, u32 add) {
#pragma unroll
        for (u32 stage = 0; stage < STAGES; ++stage)
#pragma unroll
            for (u32 at = 0; at < ROW; at += STEP)
                WGMMA(d, a_tiles + (stage * A_STAGE + at) / 16, b_tiles + (stage * B_STAGE + at) / 16,
                      stage || at ? 1 : add);
    });
}
