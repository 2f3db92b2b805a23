// Tiles of A and B in shared memory, 8 x 8 outputs per thread. ELEMENT is the dtype of every matrix; strides are in
// elements. A_ALONG_K and B_ALONG_K tell whether an operand is contiguous along K; A_VECTOR, B_VECTOR and OUT_VECTOR
// tell whether four elements can move at once.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

constexpr int TILE = 128;  // rows of A, columns of B
constexpr int DEPTH = 8;
constexpr int THREADS = 256;
constexpr int GROUP = 4;             // elements of an operand that a thread loads per tile, at once if possible
constexpr int PITCH = TILE + GROUP;  // so a warp's two k, four apart, use 16 banks each
constexpr int SPAN = TILE / 2;       // a thread has four neighbouring outputs, and four half a tile further
static_assert(TILE * DEPTH == THREADS * GROUP);

struct alignas(GROUP * sizeof(ELEMENT)) Group {
    ELEMENT values[GROUP];
};

// Loads a tile of TILE x DEPTH early from memory to registers, then writes it to shared memory as fp32 with TILE
// innermost. Neighbouring threads load neighbours in memory.
template <bool ALONG_K, bool VECTOR>
struct Operand {
    const ELEMENT* base;
    long long stride_outer, stride_k;
    long long first;  // row of A or column of B
    int outer_size, K;
    Group group;

    static __device__ int own_outer() { return ALONG_K ? threadIdx.x / 2 : threadIdx.x % 32 * GROUP; }
    static __device__ int own_k() { return ALONG_K ? threadIdx.x % 2 * GROUP : threadIdx.x / 32; }

    __device__ void fetch(int k_begin) {
        const long long outer = first + own_outer();
        const int k = k_begin + own_k();
        const long long step_outer = VECTOR && !ALONG_K ? 1 : stride_outer, step_k = VECTOR && ALONG_K ? 1 : stride_k;
        const ELEMENT* from = base + outer * step_outer + k * step_k;
        const bool whole = ALONG_K ? outer < outer_size && k + GROUP <= K : outer + GROUP <= outer_size && k < K;
        if (VECTOR && whole) {
            group = *reinterpret_cast<const Group*>(from);
            return;
        }
#pragma unroll
        for (int i = 0; i < GROUP; ++i) {
            const bool inside = ALONG_K ? outer < outer_size && k + i < K : outer + i < outer_size && k < K;
            group.values[i] = inside ? from[i * (ALONG_K ? step_k : step_outer)] : static_cast<ELEMENT>(0.0f);
        }
    }

    __device__ void keep(float (*tile)[PITCH]) const {
        float values[GROUP];
#pragma unroll
        for (int i = 0; i < GROUP; ++i) values[i] = static_cast<float>(group.values[i]);
        const int outer = own_outer(), k = own_k();
        if (ALONG_K) {
#pragma unroll
            for (int i = 0; i < GROUP; ++i) tile[k + i][outer] = values[i];
        } else {
            *reinterpret_cast<float4*>(&tile[k][outer]) = make_float4(values[0], values[1], values[2], values[3]);
        }
    }
};

__device__ void load_eight(float (&into)[8], const float* row) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float4 found = *reinterpret_cast<const float4*>(row + half * SPAN);
        into[4 * half] = found.x;
        into[4 * half + 1] = found.y;
        into[4 * half + 2] = found.z;
        into[4 * half + 3] = found.w;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) gemm_shared_tiles(
    const ELEMENT* __restrict__ a, const ELEMENT* __restrict__ b, const ELEMENT* __restrict__ bias,
    const ELEMENT* __restrict__ residual, ELEMENT* __restrict__ out, int M, int N, int K, long long stride_am,
    long long stride_ak, long long stride_bk, long long stride_bn, long long stride_rm, long long stride_om) {
    __shared__ alignas(16) float a_tiles[2][DEPTH][PITCH], b_tiles[2][DEPTH][PITCH];
    const int tiles_n = (N - 1) / TILE + 1;
    const long long first_row = static_cast<long long>(blockIdx.x / tiles_n) * TILE;
    const long long first_column = static_cast<long long>(blockIdx.x % tiles_n) * TILE;
    Operand<A_ALONG_K, A_VECTOR> left{a, stride_am, stride_ak, first_row, M, K, {}};
    Operand<B_ALONG_K, B_VECTOR> right{b, stride_bn, stride_bk, first_column, N, K, {}};

    // A warp is 4 x 8 threads: per k it reads 64 bytes of A and 128 of B, twice: the least for 8 x 8 outputs each.
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int own_row = (warp / 2 * 4 + lane / 8) * GROUP, own_column = (warp % 2 * 8 + lane % 8) * GROUP;
    float total[8][8] = {};
    const int steps = (K + DEPTH - 1) / DEPTH;
    if (steps > 0) {
        left.fetch(0);
        right.fetch(0);
        left.keep(a_tiles[0]);
        right.keep(b_tiles[0]);
    }
    __syncthreads();
    for (int step = 0; step < steps; ++step) {
        const bool more = step + 1 < steps;
        if (more) {
            left.fetch((step + 1) * DEPTH);
            right.fetch((step + 1) * DEPTH);
        }
#pragma unroll
        for (int k = 0; k < DEPTH; ++k) {
            float x[8], y[8];
            load_eight(x, &a_tiles[step % 2][k][own_row]);
            load_eight(y, &b_tiles[step % 2][k][own_column]);
#pragma unroll
            for (int i = 0; i < 8; ++i)
#pragma unroll
                for (int j = 0; j < 8; ++j) total[i][j] = fmaf(x[i], y[j], total[i][j]);
        }
        if (more) {
            left.keep(a_tiles[(step + 1) % 2]);
            right.keep(b_tiles[(step + 1) % 2]);
        }
        // One barrier per step: the next step writes the tile that all threads have read before this.
        __syncthreads();
    }

#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const long long row = first_row + own_row + i / 4 * SPAN + i % 4;
        if (row >= M) continue;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const long long column = first_column + own_column + half * SPAN;
            Group group;
#pragma unroll
            for (int j = 0; j < GROUP; ++j) {
                float value = total[i][4 * half + j];
                if (column + j < N) {
                    if (bias != nullptr) value += static_cast<float>(bias[column + j]);
                    if (residual != nullptr) value += static_cast<float>(residual[row * stride_rm + column + j]);
                }
                group.values[j] = static_cast<ELEMENT>(value);
            }
            ELEMENT* to = out + row * stride_om + column;
            if (OUT_VECTOR && column + GROUP <= N) {
                *reinterpret_cast<Group*>(to) = group;
                continue;
            }
#pragma unroll
            for (int j = 0; j < GROUP; ++j)
                if (column + j < N) to[j] = group.values[j];
        }
    }
}
