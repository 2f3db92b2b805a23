"""CUDA C++ that kernels for Hopper share: mbarriers, addresses in shared memory, and products by wgmma."""

from __future__ import annotations

BARRIERS = r"""
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
"""
"""Barriers in shared memory, by their addresses."""


def products(n: int, types: str, k: int, transposed: tuple[bool, bool] | None) -> str:
    """`multiply`, which starts d = a b or d += a b for 64 rows and `n` columns, and `settle`, which waits for all.

    types: those of a and b in the opcode; k: K of an instruction; transposed: which operands are contiguous along their
    rows of M or N instead of K; None where the opcode does not say (PTX ISA 8.7, `wgmma.mma_async`).
    """
    count = n // 2
    registers = ", ".join(f"%{index}" for index in range(count))
    outputs = ", ".join(f'"+f"(d[{index}])' for index in range(count))
    last = ", 1, 1" + ("" if transposed is None else "".join(f", {int(flag)}" for flag in transposed))
    return f"""
__device__ __forceinline__ void multiply(float (&d)[{count}], u64 a, u64 b, int keeps) {{
    asm volatile("{{.reg .pred p; setp.ne.s32 p, %{count + 2}, 0; wgmma.mma_async.sync.aligned.m64n{n}k{k}.f32.{types} "
                 "{{{registers}}}, %{count}, %{count + 1}, p{last};}}" : {outputs} : "l"(a), "l"(b), "r"(keeps));
}}
__device__ __forceinline__ void settle(float (&d)[{count}]) {{
    asm volatile("wgmma.wait_group.sync.aligned 0;" : {outputs} :: "memory");
}}
"""
