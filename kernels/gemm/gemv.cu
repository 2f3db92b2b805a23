// Loads rows of the weight to registers and adds sums in a warp, a CTA and a cluster; compiled per config by macros.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "hopper.h"
#include "pdl.h"

using i64 = long long;

#if ELEMENT == 4
using T = float;
#elif ELEMENT == 2
using T = __nv_bfloat16;
#else
using T = __half;
#endif
constexpr int VECTOR = BYTES / (int)sizeof(T);

struct alignas(BYTES) Vector {
    T value[VECTOR];
};

// The weight is used once: the load bypasses L1, and L2 evicts it first.
__device__ __forceinline__ Vector load_weight(const T* from, u64 policy) {
    Vector vector;
#if BYTES == 16
    uint4& raw = reinterpret_cast<uint4&>(vector);
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
                 : "l"(from), "l"(policy));
#else
    vector = *reinterpret_cast<const Vector*>(from);
#endif
    return vector;
}

__device__ __forceinline__ void multiply(const Vector (&w)[ROWS], const T* a, i64 stride_a, float (&sum)[ROWS][M]) {
    for (int m = 0; m < M; ++m) {
        const Vector x = *reinterpret_cast<const Vector*>(a + m * stride_a);
        for (int r = 0; r < ROWS; ++r)
            for (int v = 0; v < VECTOR; ++v)
                sum[r][m] = fmaf(static_cast<float>(w[r].value[v]), static_cast<float>(x.value[v]), sum[r][m]);
    }
}

extern "C" __global__ void
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
__launch_bounds__(32 * WARPS, ROWS * UNROLL <= 8 && ROWS * M <= 4 ? 4 : 2)
gemv(const T* a, const T* weight, const T* bias, const T* residual, T* out, int N, int K, i64 stride_a,
     i64 stride_weight, i64 stride_residual, i64 stride_out) {
    __shared__ float partial[WARPS][ROWS * M];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, rank = blockIdx.x % SPLIT;
    const int share = rank * WARPS_K + warp % WARPS_K;
    const int group = blockIdx.x / SPLIT * (WARPS / WARPS_K) + warp / WARPS_K;
    const int first = group * ROWS;
    u64 policy = 0;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));

    const T* rows[ROWS];
    for (int r = 0; r < ROWS; ++r)
        rows[r] = weight + (i64)min(first + r, N - 1) * stride_weight + (share * 32 + lane) * VECTOR;
    a += (share * 32 + lane) * VECTOR;
    float sum[ROWS][M] = {};
    // The next piece of a warp is STEP values further; `k` is the lane's place in the first of UNROLL pieces.
    constexpr int STEP = SPLIT * WARPS_K * 32 * VECTOR;
    int k = (share * 32 + lane) * VECTOR;
#pragma unroll 1
    for (; k - lane * VECTOR + (UNROLL - 1) * STEP + 32 * VECTOR <= K; k += UNROLL * STEP) {
        Vector w[UNROLL][ROWS];
        for (int u = 0; u < UNROLL; ++u)
            for (int r = 0; r < ROWS; ++r) w[u][r] = load_weight(rows[r] + u * STEP, policy);
        if (k < STEP) wait_for_kernel_before();  // in the first round
        for (int u = 0; u < UNROLL; ++u) multiply(w[u], a + u * STEP, stride_a, sum);
        for (int r = 0; r < ROWS; ++r) rows[r] += UNROLL * STEP;
        a += UNROLL * STEP;
    }
    wait_for_kernel_before();  // for warps without a first round
    for (; k < K; k += STEP) {
        Vector w[ROWS];
        for (int r = 0; r < ROWS; ++r) w[r] = load_weight(rows[r], policy);
        multiply(w, a, stride_a, sum);
        for (int r = 0; r < ROWS; ++r) rows[r] += STEP;
        a += STEP;
    }
    for (int r = 0; r < ROWS; ++r)
        for (int m = 0; m < M; ++m) {
            for (int step = 16; step; step /= 2) sum[r][m] += __shfl_xor_sync(~0u, sum[r][m], step);
            if (lane == 0) partial[warp][m * ROWS + r] = sum[r][m];
        }
    if (SPLIT > 1) cluster_barrier(); else if (WARPS_K > 1) __syncthreads(); else __syncwarp();

    const int row = first + lane % ROWS, m = lane / ROWS;
    if (rank == 0 && warp % WARPS_K == 0 && m < M && row < N) {
        float total = 0;
        for (int other = 0; other < SPLIT; ++other)
            for (int w = 0; w < WARPS_K; ++w) {
                const float* from = &partial[warp + w][lane];
                total += SPLIT > 1 ? load_cluster(shared_address(from), other) : *from;
            }
        if (bias) total += static_cast<float>(bias[row]);
        if (residual) total += static_cast<float>(residual[m * stride_residual + row]);
        out[m * stride_out + row] = static_cast<T>(total);
    }
    // No CTA exits while another CTA reads its sums.
    if (SPLIT > 1) cluster_barrier();
}
