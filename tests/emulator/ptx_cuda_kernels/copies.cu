// Asynchronous copies, tensor cores and clusters, in inline PTX. RACY leaves out what orders a step: the tests compile
// the file once as it is, and once for each number.

#ifndef RACY
#define RACY 0
#endif

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

struct alignas(64) TensorMap {
    char bytes[128];
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void init(u64* bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(count) : "memory");
}
__device__ __forceinline__ void expect(u64* bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes)
                 : "memory");
}
__device__ __forceinline__ void wait(u64* bar, u32 parity) {
    asm volatile(
        "{\n\t.reg .pred done;\n\t"
        "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
        "@done bra over;\n\tbra again;\n\tover:\n\t}" ::"r"(shared_address(bar)),
        "r"(parity)
        : "memory");
}
__device__ __forceinline__ void poll(u64* bar, u32 parity) {
    u32 done = 0;
    while (!done) {
        asm volatile(
            "{\n\t.reg .pred p;\n\tmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n\t"
            "selp.u32 %0, 1, 0, p;\n\t}"
            : "=r"(done)
            : "r"(shared_address(bar)), "r"(parity)
            : "memory");
    }
}
__device__ __forceinline__ void fence_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int NEWEST>
__device__ __forceinline__ void wait_stores() {
    asm volatile("cp.async.bulk.wait_group %0;" ::"n"(NEWEST) : "memory");
}

// y = 2 x, 256 floats a block, there and back by bulk copies. RACY 3: reads before it waits. RACY 4: no proxy fence
// before the copy back. RACY 5: the block ends without waiting. RACY 6: only one warp's writes are waited for.
extern "C" __global__ void bulk_there_and_back(const float* x, float* y, int polls) {
    __shared__ __align__(128) float tile[256];
    __shared__ u64 bar;
    const int i = threadIdx.x;
    if (i == 0) {
        init(&bar, 1);
        fence_init();
    }
    __syncthreads();
    if (i == 0) {
        expect(&bar, 1024);
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                         shared_address(tile)),
                     "l"(x + blockIdx.x * 256), "r"(1024), "r"(shared_address(&bar))
                     : "memory");
    }
    if (RACY != 3) {
        if (polls) poll(&bar, 0); else wait(&bar, 0);
    }
    for (int k = i; k < 256; k += 128) tile[k] *= 2;
    if (RACY == 3) wait(&bar, 0);
    if (RACY != 4) fence_async();
    if (RACY != 6) __syncthreads();
    if (i == 0) {
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(y + blockIdx.x * 256),
                     "r"(shared_address(tile)), "r"(1024)
                     : "memory");
        commit_stores();
        if (RACY != 5) wait_stores<0>();
    }
}

__device__ __forceinline__ u32 rank_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ u32 of_rank(u32 address, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Each block of a cluster of four writes into the shared memory of the next, and reads from the one before.
extern "C" __global__ void __cluster_dims__(4, 1, 1) neighbours(const int* x, int* y) {
    __shared__ int box[64], given[64];
    const u32 rank = rank_in_cluster();
    const int i = threadIdx.x;
    given[i] = x[blockIdx.x * 64 + i] * 10;
    cluster_barrier();
    const int v = x[blockIdx.x * 64 + i];
    asm volatile("st.shared::cluster.s32 [%0], %1;" ::"r"(of_rank(shared_address(&box[i]), (rank + 1) % 4)), "r"(v)
                 : "memory");
    int theirs;
    asm volatile("ld.shared::cluster.s32 %0, [%1];"
                 : "=r"(theirs)
                 : "r"(of_rank(shared_address(&given[63 - i]), (rank + 3) % 4))
                 : "memory");
    cluster_barrier();
    y[blockIdx.x * 64 + i] = box[i] + theirs;
    cluster_barrier();
}

// A counter in block 0's shared memory, by generic pointers and atomics of the whole cluster.
extern "C" __global__ void __cluster_dims__(2, 1, 1) shared_counter(int* y) {
    __shared__ int count;
    u64 there;
    if (threadIdx.x == 0) count = 0;
    cluster_barrier();
    asm volatile("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(&count), "r"(0));
    atomicAdd((int*)there, 1 + (int)rank_in_cluster());
    cluster_barrier();
    y[blockIdx.x * blockDim.x + threadIdx.x] = *(int*)there;
    cluster_barrier();
}

// Two blocks each load half of a tile and send it to both; blocks tell each other when they have read theirs. x:
// (rounds, 64, 32) floats. RACY 11: a half is sent before the other block has read the last.
extern "C" __global__ void __cluster_dims__(2, 1, 1)
multicast(const __grid_constant__ TensorMap map, float* y, int rounds) {
    __shared__ __align__(128) float tile[64][32];
    __shared__ u64 full, empty;
    const u32 rank = rank_in_cluster();
    const int i = threadIdx.x;
    if (i == 0) {
        init(&full, 1);
        init(&empty, 2 * 64);
        fence_init();
    }
    cluster_barrier();
    float sum = 0;
    for (int round = 0; round < rounds; ++round) {
        if (i == 0) {
            if (RACY != 11 && round) wait(&empty, (round - 1) & 1);
            expect(&full, sizeof tile);
            asm volatile(
                "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
                "[%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(tile[32 * rank])),
                "l"(&map), "r"(0), "r"(64 * round + 32 * (int)rank), "r"(shared_address(&full)), "h"((u16)3)
                : "memory");
        }
        wait(&full, round & 1);
        for (int k = 0; k < 32; ++k) sum += tile[i][(k + i) % 32] * (k + 1);
        for (u32 peer = 0; peer < 2; ++peer) {
            asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(
                             of_rank(shared_address(&empty), peer))
                         : "memory");
        }
        y[(round * 2 + rank) * 64 + i] = sum;
    }
    cluster_barrier();
}

// Each block sends two words of each thread to its neighbour by st.async. RACY 12: reads before they have come.
extern "C" __global__ void __cluster_dims__(2, 1, 1) sent_stores(const int* x, int* y) {
    __shared__ __align__(16) int box[128];
    __shared__ u64 bar;
    const u32 peer = rank_in_cluster() ^ 1;
    const int i = threadIdx.x;
    if (i == 0) {
        init(&bar, 1);
        expect(&bar, sizeof box);
        fence_init();
    }
    cluster_barrier();
    const int* mine = x + (blockIdx.x * 64 + i) * 2;
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.s32 [%0], {%1, %2}, [%3];" ::"r"(
            of_rank(shared_address(&box[2 * i]), peer)),
        "r"(mine[0]), "r"(mine[1]), "r"(of_rank(shared_address(&bar), peer))
        : "memory");
    if (RACY == 12 && i >= 32) y[blockIdx.x * 64 + i] = box[0];
    wait(&bar, 0);
    y[blockIdx.x * 64 + i] = box[127 - i] * 3 + box[i];
    cluster_barrier();
}

// Each block copies its tile into its neighbour's memory.
extern "C" __global__ void __cluster_dims__(2, 1, 1) copied_across(const int* x, int* y) {
    __shared__ __align__(16) int mine[64], theirs[64];
    __shared__ u64 bar;
    const u32 peer = rank_in_cluster() ^ 1;
    const int i = threadIdx.x;
    if (i == 0) {
        init(&bar, 1);
        fence_init();
        expect(&bar, sizeof theirs);
    }
    mine[i] = x[blockIdx.x * 64 + i] + 5;
    fence_async();
    cluster_barrier();
    if (i == 0) {
        asm volatile(
            "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                of_rank(shared_address(theirs), peer)),
            "r"(shared_address(mine)), "r"(256), "r"(of_rank(shared_address(&bar), peer))
            : "memory");
    }
    wait(&bar, 0);
    y[blockIdx.x * 64 + i] = theirs[63 - i];
    cluster_barrier();
}

// Blocks of a cluster give each other rows of global memory. RACY 14: nothing between.
extern "C" __global__ void __cluster_dims__(2, 1, 1) swapped_rows(float* x) {
    float* row = x + blockIdx.x * 64;
    const int i = threadIdx.x;
    row[i] *= 2;
    if (RACY != 14) cluster_barrier();
    const float v = x[(blockIdx.x ^ 1) * 64 + 63 - i];
    cluster_barrier();
    row[i] = v;
}
