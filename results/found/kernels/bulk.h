// Copies of 16 bytes or more by TMA, without a tensor map, between global and shared memory.
#pragma once
#include "hopper.h"

// Starts a copy from global memory; `bar` expects its bytes, and is told of them.
__device__ __forceinline__ void load_bulk(void* to, const void* from, u32 bytes, u32 bar) {
    expect(bar, bytes);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)), "l"(from), "r"(bytes), "r"(bar)
                 : "memory");
}
// Copies to global memory, and waits until it is done.
__device__ __forceinline__ void store_bulk(void* to, const void* from, u32 bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n\tcp.async.bulk.commit_group;\n\t"
                 "cp.async.bulk.wait_group 0;" ::"l"(to), "r"(shared_address(from)), "r"(bytes)
                 : "memory");
}
// Adds to global memory, and waits until shared memory has been read.
__device__ __forceinline__ void add_bulk(float* to, const float* from, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;\n\t"
                 "cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group.read 0;" ::"l"(to), "r"(shared_address(from)),
                 "r"(bytes)
                 : "memory");
}
