// Helpers of kernels for Hopper: barriers by their addresses in shared memory, the fence before asynchronous reads, and
// the memory and barriers of a cluster of CTAs.
#pragma once

using u32 = unsigned int;
using u64 = unsigned long long;

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void init(u32 bar, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}
__device__ __forceinline__ void publish_inits() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void arrive(u32 bar) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ __forceinline__ void expect(u32 bar, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
__device__ __forceinline__ void wait(u32 bar, u32 parity) {
    asm volatile(
        "{\n\t.reg .pred done;\n\t"
        "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
        "@done bra over;\n\tbra again;\n\tover:\n\t}" ::"r"(bar),
        "r"(parity)
        : "memory");
}
// Orders what this thread wrote to shared memory before copies and products that read it.
__device__ __forceinline__ void fence_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The place of a cluster's CTA at an address of this CTA's shared memory, and the value there.
__device__ __forceinline__ u32 at_rank(u32 address, u32 rank) {
    u32 there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    return there;
}
__device__ __forceinline__ float load_cluster(u32 address, u32 rank) {
    float value;
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(at_rank(address, rank)) : "memory");
    return value;
}
// Waits until all CTAs of the cluster are here, and see what the others wrote before.
__device__ __forceinline__ void cluster_barrier() {
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
