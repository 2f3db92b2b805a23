// A kernel with the macro PDL may start before the previous kernel ends (kernels/_pdl.py).
#pragma once

// Waits until the previous kernel is complete, its writes visible, and lets the next kernel start once a thread of
// every CTA is here; a second call returns at once.  ptxas moves an `ld.global.nc` from one side of it to the other.
__device__ __forceinline__ void wait_for_kernel_before() {
#ifdef PDL
    asm volatile("griddepcontrol.wait;\n\tgriddepcontrol.launch_dependents;" ::: "memory");
#endif
}
