// Functions of the library that NVRTC compiles in, one thread an element.

// y: (n, 16)
extern "C" __global__ void functions(const float* x, float* y) {
    const int i = threadIdx.x;
    const float v = x[i], p = fabsf(v) + 1e-3f;
    float* to = y + 16 * i;
    to[0] = sinf(v);
    to[1] = cosf(v);
    to[2] = expf(v);
    to[3] = logf(p);
    to[4] = v / p;
    to[5] = sqrtf(p);
    to[6] = rsqrtf(p);
    to[7] = powf(p, 1.7f);
    to[8] = tanhf(v);
    to[9] = erff(v);
    to[10] = log1pf(p);
    to[11] = exp2f(v);
    to[12] = fmodf(v, 0.7f);
    to[13] = atan2f(v, p);
    to[14] = cbrtf(v);
    to[15] = tanf(v);
}

// y: (n, 8)
extern "C" __global__ void double_functions(const double* x, double* y) {
    const int i = threadIdx.x;
    const double v = x[i], p = fabs(v) + 1e-9;
    double* to = y + 8 * i;
    to[0] = sin(v);
    to[1] = exp(v);
    to[2] = log(p);
    to[3] = v / p;
    to[4] = sqrt(p);
    to[5] = pow(p, 2.3);
    to[6] = tanh(v);
    to[7] = __dadd_rz(v, 1e-20) + fma(v, v, -p) + rint(v) + trunc(v) + ceil(v);
}
