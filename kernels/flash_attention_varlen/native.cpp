#include "_native_attention.h"

extern "C" int run(int dtype, const void* q, const void* k, const void* v, void* out, const int* q_bounds,
                    const int* k_bounds, const Shape* shape, float scale) {
    Where at{q_bounds, k_bounds, nullptr, nullptr};
    FOR_DTYPE(dtype, attention, q, k, v, out, at, *shape, scale)
}
