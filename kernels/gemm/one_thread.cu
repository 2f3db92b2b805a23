// One output per thread. ELEMENT is the dtype of every matrix; strides are in elements.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

constexpr int ROWS = 8;
constexpr int COLUMNS = 32;

extern "C" __global__ void __launch_bounds__(ROWS* COLUMNS) gemm_one_thread(
    const ELEMENT* __restrict__ a, const ELEMENT* __restrict__ b, const ELEMENT* __restrict__ bias,
    const ELEMENT* __restrict__ residual, ELEMENT* __restrict__ out, int M, int N, int K, long long stride_am,
    long long stride_ak, long long stride_bk, long long stride_bn, long long stride_rm, long long stride_om) {
    // One dimension of CTAs, because the others have at most 65535.
    const int tiles_n = (N - 1) / COLUMNS + 1;
    const long long row = static_cast<long long>(blockIdx.x / tiles_n) * ROWS + threadIdx.y;
    const long long column = static_cast<long long>(blockIdx.x % tiles_n) * COLUMNS + threadIdx.x;
    if (row >= M || column >= N) return;
    const ELEMENT* left = a + row * stride_am;
    const ELEMENT* right = b + column * stride_bn;
    float total = 0.0f;
    for (int k = 0; k < K; ++k) {
        total = fmaf(static_cast<float>(*left), static_cast<float>(*right), total);
        left += stride_ak;
        right += stride_bk;
    }
    if (bias != nullptr) total += static_cast<float>(bias[column]);
    if (residual != nullptr) total += static_cast<float>(residual[row * stride_rm + column]);
    out[row * stride_om + column] = static_cast<ELEMENT>(total);
}
