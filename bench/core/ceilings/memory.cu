// Streams 16-byte vectors through HBM or, where the arrays are small, through L2. LOAD is the instruction that
// `streams.py` names.
//
// One thread block takes a chunk of UNROLL * THREADS vectors at a time. All passes over the arrays are one sequence of
// `chunks * passes` chunks, dealt to the blocks in turn, so that no block waits between passes and the last round is a
// small part of the whole. The arrays hold a whole number of chunks.

__device__ __forceinline__ Vector load(const Vector* from) {
    Vector v;
    asm volatile(LOAD ".v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
                 : "l"(from));
    return v;
}

__device__ __forceinline__ void store(Vector* to, Vector v) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]),
                 "r"(v.word[3])
                 : "memory");
}

// Calls `take(first vector of this thread)` for every chunk that falls to this block.
template <typename Take>
__device__ __forceinline__ void deal(u32 chunks, u32 passes, Take take) {
    const u64 total = u64(chunks) * passes;
    const u32 step = gridDim.x % chunks;
    u32 chunk = blockIdx.x % chunks;
    for (u64 turn = blockIdx.x; turn < total; turn += gridDim.x) {
        take(u64(chunk) * (UNROLL * THREADS) + threadIdx.x);
        chunk += step;
        chunk -= chunk >= chunks ? chunks : 0;
    }
}

// The sum of all words, modulo 2^32: one partial sum for each thread.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
stream_read(const Vector* a, u32* sums, u32 chunks, u32 passes) {
    u32 sum = 0;
    deal(chunks, passes, [&](u64 at) {
        Vector v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) v[u] = load(a + at + u * THREADS);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) sum += v[u].word[0] + v[u].word[1] + v[u].word[2] + v[u].word[3];
    });
    sums[blockIdx.x * THREADS + threadIdx.x] = sum;
}

// Word w of vector i becomes i * 2654435761 + w modulo 2^32: different bits everywhere, the same in every pass.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
stream_write(Vector* a, u32 chunks, u32 passes) {
    deal(chunks, passes, [&](u64 at) {
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const u32 first = u32(at + u * THREADS) * 2654435761u;
            store(a + at + u * THREADS, Vector{{first, first + 1, first + 2, first + 3}});
        }
    });
}

// a = b
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
stream_copy(Vector* a, const Vector* b, u32 chunks, u32 passes) {
    deal(chunks, passes, [&](u64 at) {
        Vector v[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) v[u] = load(b + at + u * THREADS);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) store(a + at + u * THREADS, v[u]);
    });
}

// a = b + scale * c, each word an fp32 number. With twice as many vectors in registers, half as many blocks fit.
extern "C" __global__ void __launch_bounds__(THREADS, (BLOCKS_PER_SM + 1) / 2)
stream_triad(Vector* a, const Vector* b, const Vector* c, float scale, u32 chunks, u32 passes) {
    deal(chunks, passes, [&](u64 at) {
        Vector v[UNROLL], w[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            v[u] = load(b + at + u * THREADS);
            w[u] = load(c + at + u * THREADS);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float product_and_sum = fmaf(scale, __uint_as_float(w[u].word[k]), __uint_as_float(v[u].word[k]));
                v[u].word[k] = __float_as_uint(product_and_sum);
            }
            store(a + at + u * THREADS, v[u]);
        }
    });
}
