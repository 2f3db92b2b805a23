// Keeps tensor cores busy with mma.sync from registers: the way of every architecture before Hopper, and a second one
// on Hopper.
//
// MMA(d, a, b) is the one instruction, m16n8 by 32 bytes of K, which `mma_sync.py` names. A warp holds STEPS steps of K
// of a (M_TILES * 16) x (N_TILES * 8) product in registers; every tile of it is an accumulator of its own, so that no
// product waits for the one before. Accumulators start anew every RESTART passes.

constexpr u32 ROW = STEPS * 32;  // bytes of K that the operands hold

__device__ __forceinline__ u32 word(const u8* from, u32 row, u32 at) {
    return *reinterpret_cast<const u32*>(from + row * ROW + at);
}

// sums: of each thread's accumulators. a: (M_TILES * 16, ROW bytes); b: (N_TILES * 8, ROW bytes).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
mma_registers(const u8* a, const u8* b, float* sums, Clock* clocks, u32 restarts) {
    const u32 row = threadIdx.x % 32 / 4, at = threadIdx.x % 4 * 4;
    u32 left[STEPS][M_TILES][4], right[STEPS][N_TILES][2];
    float d[M_TILES][N_TILES][4];
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                left[step][m][i] = word(a, m * 16 + row + i % 2 * 8, step * 32 + at + i / 2 * 16);
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) right[step][n][i] = word(b, n * 8 + row, step * 32 + at + i * 16);
    }
    const Clock began = now();
#pragma unroll 1
    for (u32 restart = 0; restart < restarts; ++restart) {
#pragma unroll
        for (int i = 0; i < M_TILES * N_TILES * 4; ++i) d[i / 4 / N_TILES][i / 4 % N_TILES][i % 4] = 0.f;
#pragma unroll 1
        for (u32 pass = 0; pass < RESTART; ++pass) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
#pragma unroll
                for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                    for (int n = 0; n < N_TILES; ++n) MMA(d[m][n], left[step][m], right[step][n]);
        }
    }
    keep_clock(clocks, began);
    float sum = 0.f;
#pragma unroll
    for (int i = 0; i < M_TILES * N_TILES * 4; ++i) sum += d[i / 4 / N_TILES][i / 4 % N_TILES][i % 4];
    sums[blockIdx.x * THREADS + threadIdx.x] = sum;
}
