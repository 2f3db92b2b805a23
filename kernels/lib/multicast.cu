// The rungs `multicast` of gemm and gemm_fp8: CUDA C++, compiled per config by macros.
//
// The two CTAs of a cluster have tiles one below the other, which need the same columns of b.  Each CTA loads its own rows of
// a and a part of those columns, and TMA puts that part into the shared memory of both: L2 is read once for what a cluster
// shares.  A warp loads, and each consumer warpgroup multiplies 64 rows, as in `gemm/cooperative`.
//
// A slot of the ring is `full` when all its bytes have arrived, its own and its peers'.  A load writes into every CTA, so
// the slot is `empty` when no warp of the cluster reads it any more: each consumer warp arrives at every CTA's barrier.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#if HALF
#define WGMMA_TYPES "k16.f32.f16.f16"
#elif FP8
#define WGMMA_TYPES "k32.f32.e4m3.e4m3"
#else
#define WGMMA_TYPES "k16.f32.bf16.bf16"
#endif
#if FP8  // operands are always along K
#define WGMMA_LAYOUT ""
#elif A_ALONG_K && B_ALONG_K
#define WGMMA_LAYOUT ", 0, 0"
#elif A_ALONG_K
#define WGMMA_LAYOUT ", 0, 1"
#elif B_ALONG_K
#define WGMMA_LAYOUT ", 1, 0"
#else
#define WGMMA_LAYOUT ", 1, 1"
#endif
#define WGMMA_N BLOCK_N
#define CLUSTER 2
#include "hopper.h"
#include "wgmma.h"

using i64 = long long;
#if HALF
using Out = __half;
using Pair = __half2;
#else
using Out = __nv_bfloat16;
using Pair = __nv_bfloat162;
#endif

struct alignas(64) TensorMap {
    char bytes[128];
};

constexpr int BOX = 64 * 128, K_STEP = FP8 ? 128 : 64, N_BOXES = BLOCK_N / 64, BLOCK_M = 64 * CONSUMERS;
constexpr int A_BYTES = CONSUMERS * BOX, STAGE_BYTES = A_BYTES + N_BOXES * BOX, OWN_BOXES = N_BOXES / CLUSTER;
constexpr int THREADS = 128 * (CONSUMERS + 1), ROUNDS = N_BOXES / STAGED;
static_assert(N_BOXES % CLUSTER == 0 && N_BOXES % STAGED == 0, "each CTA, and each round of stores, has whole boxes");

// True for one lane of a warp; ptxas knows that it is one lane, so copies need no loop over lanes.
__device__ __forceinline__ bool elected() {
    u32 one;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(one));
    return one;
}
// A warp has read a slot: lane r tells CTA r.  The default order, of a CTA: nothing that was written is passed on, and
// a release to the cluster would be a fence of the whole GPU each time (read in SASS).
__device__ __forceinline__ void release(u32 empty) {
    const int lane = threadIdx.x % 32;
    if (lane < CLUSTER)
        asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(at_rank(empty, lane))
                     : "memory");
}
__device__ __forceinline__ void load(u32 to, const TensorMap* map, int x, int y, u32 bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::
            "r"(to),
        "l"(map), "r"(x), "r"(y), "r"(bar)
        : "memory");
}
// Copies to the same place of every CTA of the cluster; each CTA's barrier counts the bytes.
__device__ __forceinline__ void load_for_all(u32 to, const TensorMap* map, int x, int y, u32 bar) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
        "[%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(x), "r"(y), "r"(bar), "h"((unsigned short)((1 << CLUSTER) - 1))
        : "memory");
}
__device__ __forceinline__ void store(const TensorMap* map, int x, int y, u32 from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(x),
                 "r"(y), "r"(from)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until TMA has read all shared memory but that of the newest stores.
template <int NEWEST>
__device__ __forceinline__ void wait_stores() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(NEWEST) : "memory");
}
__device__ __forceinline__ void meet_warpgroup(int which) {
    asm volatile("bar.sync %0, 128;" ::"r"(1 + which) : "memory");
}
__device__ __forceinline__ void load_matrices(u32 (&r)[4], u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void store_matrices(u32 to, const u32 (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(r[0]), "r"(r[1]),
                 "r"(r[2]), "r"(r[3])
                 : "memory");
}

// An operand of wgmma in swizzled boxes.  Along K: 1024 bytes from eight rows to the next.  Otherwise a box has 64 of M
// or N in a row, and 1024 bytes lie between eight k and the next.
template <bool ALONG_K>
__device__ __forceinline__ u64 descriptor(u32 address) {
    const u64 leading = ALONG_K ? 16 : BOX;
    return (u64)(address >> 4 & 0x3fff) | leading >> 4 << 16 | (u64)(1024 >> 4) << 32 | (u64)1 << 62;
}

// The tiles of a cluster, one after the other: columns are the outer order in a group of GROUP_M rows of clusters.
struct Tiles {
    int tiles_m, tiles_n, tile, count;  // tiles_m: rows of clusters

    __device__ __forceinline__ Tiles(int M, int N) {
        tiles_m = (M + CLUSTER * BLOCK_M - 1) / (CLUSTER * BLOCK_M), tiles_n = (N + BLOCK_N - 1) / BLOCK_N;
        tile = blockIdx.x / CLUSTER, count = tiles_m * tiles_n;
    }
    __device__ __forceinline__ bool left() const { return tile < count; }
    __device__ __forceinline__ void next() { tile += gridDim.x / CLUSTER; }
    __device__ __forceinline__ void place(int rank, int& row, int& column) const {
        const u32 group_tiles = GROUP_M * tiles_n, first = tile / group_tiles * GROUP_M, inside = tile % group_tiles;
        const u32 rows = min(tiles_m - (int)first, GROUP_M);
        row = ((int)(first + inside % rows) * CLUSTER + rank) * BLOCK_M;
        column = (int)(inside / rows) * BLOCK_N;
    }
};

struct Ring {
    u32 tiles, full, empty;
    int stage = 0, parity = 0;

    __device__ __forceinline__ u32 slot() const { return tiles + stage * STAGE_BYTES; }
    __device__ __forceinline__ void next() {
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        parity ^= stage == 0;
    }
};

__device__ __forceinline__ void produce(const TensorMap* a, const TensorMap* b, Tiles tiles, int steps, Ring ring,
                                        int rank) {
#pragma unroll 1
    for (; tiles.left(); tiles.next()) {
        int row, column;
        tiles.place(rank, row, column);
#pragma unroll 1
        for (int step = 0; step < steps; ++step, ring.next()) {
            const u32 full = ring.full + 8 * ring.stage, slot = ring.slot();
            const int k = step * K_STEP;
            wait(ring.empty + 8 * ring.stage, ring.parity ^ 1);
            expect(full, STAGE_BYTES);
#pragma unroll
            for (int i = 0; i < CONSUMERS; ++i)
                load(slot + i * BOX, a, A_ALONG_K ? k : row + 64 * i, A_ALONG_K ? row + 64 * i : k, full);
#pragma unroll
            for (int i = 0; i < OWN_BOXES; ++i) {
                const int box = rank * OWN_BOXES + i, n = column + 64 * box;
                load_for_all(slot + A_BYTES + box * BOX, b, B_ALONG_K ? k : n, B_ALONG_K ? n : k, full);
            }
        }
    }
}

// Starts a consumer's products of a slot; the first of a sum replaces d.
__device__ __forceinline__ void start(float (&d)[BLOCK_N / 2], u32 slot, int which, int keeps) {
    const u64 a = descriptor<A_ALONG_K>(slot + which * BOX), b = descriptor<B_ALONG_K>(slot + A_BYTES);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int k = 0; k < 4; ++k) multiply(d, a + k * (A_ALONG_K ? 2 : 128), b + k * (B_ALONG_K ? 2 : 128), keeps | k);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

struct Epilogue {
    const TensorMap *out, *residual;
    const Out* bias;
    u32 staged, landed;  // this consumer's boxes, and a barrier for each
    int which, N;
    int landing = 0;     // parity of the tile's first round
    Pair addend[BIAS ? BLOCK_N / 8 : 1];

    __device__ __forceinline__ bool leads() const { return threadIdx.x / 32 % 4 == 0 && elected(); }
    __device__ __forceinline__ void fetch(int box, int row, int column) const {
        const u32 bar = landed + 8 * (box % STAGED);
        expect(bar, BOX);
        load(staged + box % STAGED * BOX, residual, column + 64 * box, row, bar);
    }
    // Before the products end: requests the residual, into memory that the last tile's stores have freed.
    __device__ __forceinline__ void begin(int row, int column) const {
#if RESIDUAL
        if (leads()) {
            wait_stores<0>();
#pragma unroll
            for (int box = 0; box < STAGED; ++box) fetch(box, row, column);
        }
#endif
    }
    // Work before the last product ends.
    __device__ __forceinline__ void load_bias(int column) {
#if BIAS
        const Out* from = bias + column + 2 * (threadIdx.x % 4);
#pragma unroll
        for (int i = 0; i < BLOCK_N / 8; ++i) {
            const int left = N - (column + 2 * ((int)threadIdx.x % 4) + 8 * i);
            addend[i].x = left > 0 ? from[8 * i] : Out(0.f), addend[i].y = left > 1 ? from[8 * i + 1] : Out(0.f);
        }
#endif
    }
    __device__ __forceinline__ void run(const float (&d)[BLOCK_N / 2], int row, int column) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
        const int in_box = 16 * warp + lane % 16, swizzle = lane % 8;
#pragma unroll
        for (int box = 0; box < N_BOXES; ++box) {
            const u32 mine = staged + box % STAGED * BOX;
#if RESIDUAL
            wait(landed + 8 * (box % STAGED), landing ^ (box / STAGED & 1));
#else
            if (leads()) wait_stores<STAGED - 1>();
            meet_warpgroup(which);
#endif
#pragma unroll
            for (int part = 0; part < 4; ++part) {
                const u32 place = mine + in_box * 128 + ((2 * part + lane / 16) ^ swizzle) * 16;
                u32 words[4];
#if RESIDUAL
                load_matrices(words, place);
#endif
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float2 sum = {d[32 * box + 8 * part + 2 * i], d[32 * box + 8 * part + 2 * i + 1]};
#if BIAS
                    const Pair add = addend[8 * box + 2 * part + i / 2];
                    sum.x += (float)add.x, sum.y += (float)add.y;
#endif
                    Pair pair;
#if RESIDUAL
                    pair = *reinterpret_cast<Pair*>(&words[i]);
                    sum.x += (float)pair.x, sum.y += (float)pair.y;
#endif
                    pair.x = (Out)sum.x, pair.y = (Out)sum.y;
                    words[i] = *reinterpret_cast<u32*>(&pair);
                }
#if RESIDUAL
                __syncwarp();  // ldmatrix of all lanes comes before the stores to the same rows
#endif
                store_matrices(place, words);
            }
            fence_async();
            meet_warpgroup(which);
            if (leads()) {
                store(out, column + 64 * box, row, mine);
#if RESIDUAL
                if (box + STAGED < N_BOXES) wait_stores<0>(), fetch(box + STAGED, row, column);
#endif
            }
        }
        landing ^= ROUNDS & 1;
    }
};

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, 1)
multicast(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
          const __grid_constant__ TensorMap out, const __grid_constant__ TensorMap residual, const Out* bias,
          const float* a_scale, const float* b_scale, int M, int N, int K, i64 a_scale_m, i64 a_scale_k, i64 b_scale_k,
          i64 b_scale_n) {
    extern __shared__ __align__(1024) unsigned char raw[];
    const u32 memory = shared_address(raw), staged = memory + STAGES * STAGE_BYTES;
    const u32 barriers = staged + CONSUMERS * STAGED * BOX, landed = barriers + 16 * STAGES;
    const int which = threadIdx.x / 128, steps = (K + K_STEP - 1) / K_STEP;
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    Ring ring{memory, barriers, barriers + 8 * STAGES};
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage)
            init(ring.full + 8 * stage, 1), init(ring.empty + 8 * stage, 4 * CONSUMERS * CLUSTER);
        for (int box = 0; box < CONSUMERS * STAGED * RESIDUAL; ++box) init(landed + 8 * box, 1);
        publish_inits();
    }
    cluster_barrier();
    Tiles tiles(M, N);
    if (which == CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x / 32 == 4 * CONSUMERS && elected()) produce(&a, &b, tiles, steps, ring, rank);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
        Epilogue epilogue{&out, &residual, bias, staged + which * STAGED * BOX, landed + 8 * which * STAGED, which, N};
        float d[BLOCK_N / 2];
#pragma unroll 1
        for (; tiles.left(); tiles.next()) {
            int row, column;
            tiles.place(rank, row, column);
            row += 64 * which;
            epilogue.begin(row, column);
#if FP8
            float sums[BLOCK_N / 2] = {};
#if BLOCK_SCALES
            const int of_lane = row + (int)threadIdx.x % 128 / 32 * 16 + (int)threadIdx.x % 32 / 4;
            const float* a_scales = a_scale + of_lane * a_scale_m;
            const float* b_scales = b_scale + column / 128 * b_scale_n;
#endif
#pragma unroll 1
            for (int step = 0; step < steps; ++step, ring.next()) {
                float scale[2] = {1.f, 1.f};
#if BLOCK_SCALES
                // Loaded before the wait for the tile, so that the scales arrive before the product ends.
                for (int h = 0; h < 2; ++h)
                    scale[h] = of_lane + 8 * h < M ? a_scales[8 * h * a_scale_m] * *b_scales : 0.f;
                a_scales += a_scale_k, b_scales += b_scale_k;
#endif
                wait(ring.full + 8 * ring.stage, ring.parity);
                start(d, ring.slot(), which, 0);
                settle(d);
                release(ring.empty + 8 * ring.stage);
#pragma unroll
                for (int i = 0; i < BLOCK_N / 2; ++i) sums[i] += BLOCK_SCALES ? d[i] * scale[i / 2 % 2] : d[i];
            }
            const float by = BLOCK_SCALES ? 1.f : *a_scale * *b_scale;
#pragma unroll
            for (int i = 0; i < BLOCK_N / 2; ++i) d[i] = sums[i] * by;
            settle(d);  // keeps the bias behind the sums, whose registers it takes
            epilogue.load_bias(column);
#else
            int before = 0;
#pragma unroll 1
            for (int step = 0; step < steps; ++step, ring.next()) {
                wait(ring.full + 8 * ring.stage, ring.parity);
                start(d, ring.slot(), which, step);
                // One product stays in flight; the previous product is done, and its slot is free.
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (step) release(ring.empty + 8 * before);
                before = ring.stage;
            }
            epilogue.load_bias(column);
            settle(d);
            release(ring.empty + 8 * before);
#endif
            epilogue.run(d, row, column);
        }
        if (epilogue.leads()) wait_stores<0>();  // shared memory must live until TMA has read it
    }
    __syncwarp();
    cluster_barrier();  // no CTA exits while another CTA arrives at its barriers or fills its memory
}
