// Keeps the fp32 pipe or the special-function unit busy from registers. Every thread does the same number of steps.

// PAIRS points (x, y) per thread, each turned by x += turn * y; y -= turn * x: two dependent fused multiply-adds that
// keep values bounded and changing. A step is linear, so the sum of a thread's points after any number of steps is
// known, and a step left out shows as another angle.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
fma_fp32(const float2* start, float2* sums, Clock* clocks, float turn, u32 rounds) {
    float x[PAIRS], y[PAIRS];
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
        const float2 point = start[p * THREADS + threadIdx.x];
        x[p] = point.x;
        y[p] = point.y;
    }
    const Clock began = now();
#pragma unroll 1
    for (u32 round = 0; round < rounds; ++round) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
#pragma unroll
            for (int p = 0; p < PAIRS; ++p) x[p] = fmaf(turn, y[p], x[p]);
#pragma unroll
            for (int p = 0; p < PAIRS; ++p) y[p] = fmaf(-turn, x[p], y[p]);
        }
    }
    keep_clock(clocks, began);
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) {
        sum.x += x[p];
        sum.y += y[p];
    }
    sums[blockIdx.x * THREADS + threadIdx.x] = sum;
}

__device__ __forceinline__ float special(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The sum of f(first + n * step) over n below rounds * STEPS: for each a multiply-add and two adds beside f, which are
// a quarter of f's time on the fp32 pipe.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
special_function(const float* first, float* sums, Clock* clocks, float step, u32 rounds) {
    const float origin = first[threadIdx.x];
    float sum[PAIRS] = {};
    float n = 0.f;
    const Clock began = now();
#pragma unroll 1
    for (u32 round = 0; round < rounds; ++round) {
#pragma unroll
        for (int s = 0; s < STEPS; ++s) {
            const float x = fmaf(n + s, step, origin);
            sum[s % PAIRS] += special(x);
        }
        n += STEPS;
    }
    keep_clock(clocks, began);
    float total = 0.f;
#pragma unroll
    for (int p = 0; p < PAIRS; ++p) total += sum[p];
    sums[blockIdx.x * THREADS + threadIdx.x] = total;
}
