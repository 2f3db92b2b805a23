// What a kernel must not do. The tests look for the lines by the words behind the statements.

extern "C" __global__ void copy(const float* x, float* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i];  // the copy
}

extern "C" __global__ void asserts(const int* x) {
    assert(x[threadIdx.x] < 5);  // the assertion
}
