// What a kernel must not do. The tests look for the lines by the words behind the statements.

extern "C" __global__ void copy(const float* x, float* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i];  // the copy
}

extern "C" __global__ void asserts(const int* x) {
    assert(x[threadIdx.x] < 5);  // the assertion
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
