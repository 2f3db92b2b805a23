// What a kernel must not do. The tests look for the lines by the words behind the statements.

using u32 = unsigned int;
using u64 = unsigned long long;

extern "C" __global__ void copy(const float* x, float* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i];  // the copy
}

extern "C" __global__ void misaligned(const char* x, float* y) {
    y[threadIdx.x] = *(const float*)(x + 4 * threadIdx.x + 2);  // misaligned read
}
extern "C" __global__ void null_pointer(int* y) {
    if (threadIdx.x == 3) *y = 1;  // write to null
}

extern __shared__ float dynamic[];

extern "C" __global__ void shared_read_behind_the_end(float* y, int n) {
    dynamic[threadIdx.x] = 1;
    __syncthreads();
    y[threadIdx.x] = dynamic[threadIdx.x + n];  // shared read behind the end
}
extern "C" __global__ void shared_misaligned(float* y, int n) {
    dynamic[threadIdx.x] = 1;
    y[threadIdx.x] = *(float*)((char*)dynamic + 4 * threadIdx.x + n);  // misaligned shared read
}
extern "C" __global__ void shared_unwritten(float* y) {
    if (threadIdx.x != 5) dynamic[threadIdx.x] = 1;
    __syncthreads();
    y[threadIdx.x] = dynamic[threadIdx.x];  // read of what nobody wrote
}
extern "C" __global__ void sum_of_unwritten(const float* x, float* y) {
    y[threadIdx.x] += x[threadIdx.x];  // adds to what nobody wrote
}
extern "C" __global__ void local_behind_the_end(const int* x, int* y) {
    int own[8];
    for (int k = 0; k < 8; ++k) own[k] = k * x[k];
    y[threadIdx.x] = own[x[threadIdx.x]];  // local read behind the end
}

__constant__ int fixed[4] = {1, 2, 3, 4};
extern "C" __global__ void constant_write(int n) {
    asm volatile("st.s32 [%0], 5;" ::"l"(&fixed[n]) : "memory");  // write to a constant
}

extern "C" __global__ void half_a_barrier(int* y) {
    if (threadIdx.x < 32) {
        asm volatile("bar.sync 1, 64;" ::: "memory");  // waits at barrier 1
    } else {
        asm volatile("bar.sync 2, 64;" ::: "memory");  // waits at barrier 2
    }
    y[threadIdx.x] = 1;
}
extern "C" __global__ void barrier_in_a_branch(int* y) {
    if (threadIdx.x % 2) __syncthreads();  // only odd threads
    y[threadIdx.x] = 1;
    __syncthreads();  // all threads
    y[threadIdx.x] = 2;
}
extern "C" __global__ void nobody_arrives(int* y) {
    __shared__ u64 bar;
    const u32 at = (u32)__cvta_generic_to_shared(&bar);
    if (threadIdx.x == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 2;" ::"r"(at) : "memory");
    __syncthreads();
    u32 done = 0;
    while (!done) {
        asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n\tselp.u32 %0, 1, 0, p;\n\t}" : "=r"(done) : "r"(at) : "memory");  // waits at the mbarrier
    }
    y[threadIdx.x] = 1;
}
extern "C" __global__ void no_mbarrier(int* y) {
    __shared__ u64 bar;
    const u32 at = (u32)__cvta_generic_to_shared(&bar);
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory");  // arrives at nothing
    y[0] = 1;
}
extern "C" __global__ void nobody_sets_the_flag(volatile int* flag, int* y) {
    while (*flag == 0) {}  // asks for ever
    y[threadIdx.x] = 1;
}

extern "C" __global__ void traps(const int* x) {
    if (x[threadIdx.x] == 9) __trap();  // the trap
}
extern "C" __global__ void asserts(const int* x) {
    assert(x[threadIdx.x] < 5);  // the assertion
}
extern "C" __global__ void prints(const int* x, int* y) {
    if (x[threadIdx.x] > 3) printf("%d of thread %d, %f\n", x[threadIdx.x], threadIdx.x, 0.5);
    y[threadIdx.x] = x[threadIdx.x] + printf("nothing\n") * 0;
}

#ifdef RECURSION
__device__ __noinline__ int factorial(int n) {
    return n < 2 ? 1 : n * factorial(n - 1) + factorial(n - 2);  // calls itself
}
extern "C" __global__ void recursive(int* y) { y[threadIdx.x] = factorial(threadIdx.x); }
#endif

#ifdef POINTER
__device__ int one(int v) { return v + 1; }
__device__ int two(int v) { return v + 2; }
typedef int (*Function)(int);
__device__ Function functions[2] = {one, two};
extern "C" __global__ void by_pointer(int* y) { y[threadIdx.x] = functions[threadIdx.x & 1](3); }
#endif

extern "C" __global__ void much_shared(float* y) {
    __shared__ float own[12000];
    own[threadIdx.x] = y[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = own[threadIdx.x] + dynamic[0];
}

extern "C" __global__ void bulk_outside(const float* x, float* y) {
    __shared__ __align__(16) float tile[64];
    __shared__ u64 bar;
    const u32 at = (u32)__cvta_generic_to_shared(&bar), to = (u32)__cvta_generic_to_shared(tile);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n\tfence.mbarrier_init.release.cluster;" ::"r"(at) : "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 256;" ::"r"(at) : "memory");
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 256, [%2];" ::"r"(to), "l"(x + 16), "r"(at) : "memory");  // copies from outside
    }
    __syncthreads();
    u32 done = 0;
    while (!done) {
        asm volatile(
            "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], 0;\n\tselp.u32 %0, 1, 0, p;\n\t}"
            : "=r"(done) : "r"(at) : "memory");
    }
    y[threadIdx.x] = tile[threadIdx.x];
}

extern "C" __global__ void shuffle_in_a_branch(const int* x, int* y) {
    int v = x[threadIdx.x];
    if (threadIdx.x < 16) v = __shfl_xor_sync(0xffffffffu, v, 1);  // names lanes that never come
    y[threadIdx.x] = v;
    __syncwarp();  // the others
    y[threadIdx.x] = 2 * v;
}
