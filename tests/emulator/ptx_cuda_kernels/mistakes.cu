// What a kernel must not do. The tests look for the lines by the words behind the statements.

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
