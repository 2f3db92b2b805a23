// A kernel that may start before the kernel before it ends (kernels/_pdl.py): it has the macro PDL then.
#pragma once

// Waits until the kernel before is complete and its writes are visible, and lets the next kernel start once a thread of
// every CTA is here; a second call returns at once.  ptxas moves an `ld.global.nc` from one side of it to the other.
__device__ __forceinline__ void wait_for_kernel_before() {
#ifdef PDL
    asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}
