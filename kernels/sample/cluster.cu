// Device code of `cluster`: a row in the shared memory of CLUSTER CTAs; thresholds, ties and race are found there.
//
// CUDA C++, compiled per config by macros: CLUSTER, THREADS, ELEMENT (4: fp32, 2: bf16, 1: fp16), BYTES of a load, EDITS
// (1: there may be edits or a mask), TOP_N.

// The largest and the least finite value.
__device__ __forceinline__ void extremes(Shared& shared, int& turn, Row& row) {
    float ends[2] = {NEVER, NEVER};
    for (int i = threadIdx.x; i < row.groups; i += THREADS) {
        const float4 x = row.four[i];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float one = j == 0 ? x.x : j == 1 ? x.y : j == 2 ? x.z : x.w;
            ends[0] = fmaxf(ends[0], one);
            ends[1] = fmaxf(ends[1], one > NEVER ? -one : NEVER);
        }
    }
    combine<true>(shared, turn, ends);
    row.best = ends[0], row.least = -ends[1];
}

// log E, E = -log1p(-u): see `log_exponential` of bisect.
__device__ __forceinline__ float uniform(u32 word) {
    return fminf(__fadd_rn(__fmul_rn((float)word, 0x1p-32f), 0x1p-33f), 0.999999940395355224609375f);
}

__device__ __forceinline__ uint4 philox(u64 seed, u32 position, u32 block) {
    u32 k0 = (u32)seed, k1 = (u32)(seed >> 32), c0 = position, c1 = block, c2 = 0, c3 = 0;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u32 high0 = __umulhi(c0, 0xD2511F53u), low0 = c0 * 0xD2511F53u;
        const u32 high1 = __umulhi(c2, 0xCD9E8D57u), low1 = c2 * 0xCD9E8D57u;
        c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return make_uint4(c0, c1, c2, c3);
}

extern "C" __global__ void
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
__launch_bounds__(THREADS, TOP_N > 0 ? 1 : 2)
sample(const T* logits, const float* temperatures, const int* top_ks, const float* top_ps, const float* min_ps,
       const i64* seeds, const i64* positions, const float* repetition, const float* presence, const float* frequency,
       const int* offsets, const int* ids, const int* counts, const float* bias, const u32* allowed_bits,
       i64* tokens, i64* logprob_ids, float* logprobs, int V, int share, i64 stride) {
    extern __shared__ float4 four[];
    __shared__ Shared shared;
    float* row_values = reinterpret_cast<float*>(four);
    const u32 rank = blockIdx.x % CLUSTER;
    const i64 b = blockIdx.x / CLUSTER;
    const T* from = logits + b * stride;
    int turn = 0;
    Row row;
    row.four = four, row.groups = share / 4, row.first = rank * share, row.rate = 1.4426950408889634f;
    const int length = max(0, min(share, V - row.first)), vectors = length / VECTOR;
    for (int i = threadIdx.x; i < vectors; i += UNROLL * THREADS) {
        Vector held[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (i + u * THREADS < vectors) held[u] = load(from + row.first + (i + u * THREADS) * VECTOR);
#pragma unroll
        for (int u = 0; u < UNROLL; ++u)
            if (i + u * THREADS < vectors)
#pragma unroll
                for (int v = 0; v < VECTOR; ++v)
                    row_values[(i + u * THREADS) * VECTOR + v] = lawful(static_cast<float>(held[u].value[v]));
    }
    for (int i = vectors * VECTOR + threadIdx.x; i < share; i += THREADS)
        row_values[i] = i < length ? lawful(static_cast<float>(from[row.first + i])) : NEVER;
    __syncthreads();

#if TOP_N >= 0
    // Of the logits as they came: their sum, and the likeliest, in the order of value and id.
    extremes(shared, turn, row);
    const float raw_best = row.best;
    float all[3];
    tail_of(shared, turn, row, NEVER, all);
    const float log_sum = logf(all[1]);
#if TOP_N > 0
    float cut_n = NEVER, last_n = 0.f;
    if (all[0] > TOP_N) {
        cut_n = find_cut(shared, turn, row, false, (float)TOP_N, all[0]);
        float sums[3];
        tail_of(shared, turn, row, cut_n, sums);
        last_n = last_tie(shared, turn, row, cut_n, TOP_N - (int)sums[0], rank);
    } else if (all[0] < TOP_N)
        last_n = last_tie(shared, turn, row, NEVER, TOP_N - (int)all[0], rank);
    if (threadIdx.x == 0) shared.lengths[0] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < row.groups; i += THREADS) {
        const float4 x = four[i];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float one = j == 0 ? x.x : j == 1 ? x.y : j == 2 ? x.z : x.w;
            const int id = row.first + 4 * i + j;
            if (one > cut_n || (one == cut_n && id <= last_n && all[0] != TOP_N)) {
                const int place = atomicAdd(&shared.lengths[0], 1);
                shared.list[place] = one, shared.list[TOP_N + place] = (float)id;
            }
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) shared.length = (float)shared.lengths[0];
    barrier();
    if (rank == 0) {
        int start = 0;
        for (int r = 0; r < CLUSTER; ++r) {
            const int count = (int)load_cluster(&shared.length, r);
            if (threadIdx.x < count) {
                shared.found[start + threadIdx.x] = load_cluster(&shared.list[threadIdx.x], r);
                shared.weight[start + threadIdx.x] = load_cluster(&shared.list[TOP_N + threadIdx.x], r);
            }
            start += count;
        }
        __syncthreads();
        if (threadIdx.x < TOP_N) {
            const float own = shared.found[threadIdx.x], id = shared.weight[threadIdx.x];
            int place = 1;
            for (int i = 0; i < TOP_N; ++i)
                place += shared.found[i] > own || (shared.found[i] == own && shared.weight[i] < id);
            logprob_ids[b * (1 + TOP_N) + place] = (i64)id;
            logprobs[b * (1 + TOP_N) + place] = own - raw_best - log_sum;
        }
    }
    barrier();
#endif
#endif

#if EDITS
    if (offsets)
        for (int e = offsets[b] + threadIdx.x; e < offsets[b + 1]; e += THREADS) {
            const int at = ids[e] - row.first, count = counts[e];
            if (at < 0 || at >= length) continue;
            float x = __fadd_rn(row_values[at], bias[e]);
            if (count >= 0 && repetition) x = x > 0.f ? __fdiv_rn(x, repetition[b]) : __fmul_rn(x, repetition[b]);
            if (count > 0)
                x = __fsub_rn(x, __fadd_rn(frequency ? __fmul_rn(frequency[b], (float)count) : 0.f,
                                           presence ? presence[b] : 0.f));
            row_values[at] = lawful(x);
        }
    __syncthreads();
    if (allowed_bits)
        for (int i = threadIdx.x; i < row.groups; i += THREADS) {
            const int id = row.first + 4 * i;
            if (id >= V) break;
            const u32 bits = allowed_bits[b * ((V + 31) / 32) + id / 32] >> (id % 32);
            float4 x = four[i];
            x.x = bits & 1 ? x.x : NEVER, x.y = bits & 2 ? x.y : NEVER;
            x.z = bits & 4 ? x.z : NEVER, x.w = bits & 8 ? x.w : NEVER;
            four[i] = x;
        }
    __syncthreads();
#endif

    extremes(shared, turn, row);
    const float temperature = temperatures[b];
    const int top_k = top_ks[b];
    const float top_p = top_ps[b], min_p = min_ps[b];
    const bool draws = temperature > 0.f && row.best > NEVER;
    float cut = NEVER, last = -1.f, least_weight = 0.f;
    if (draws) {
        row.rate = fminf(__fdiv_rn(1.4426950408889634f, temperature), LARGEST);
        least_weight = min_p;
        float sums[3] = {};
        const bool by_count = top_k > 0 && top_k < V;
        if (by_count || top_p < 1.f) tail_of(shared, turn, row, NEVER, sums);
        float kept = sums[1], ties = 0.f, wanted = 0.f;
        // At first by count, then by mass in what is left: one piece of code for both.
        for (int by_mass = 0; by_mass < 2; ++by_mass) {
            if (by_mass ? top_p >= 1.f : !by_count || sums[0] <= top_k) continue;
            const float limit = by_mass ? top_p * kept : (float)top_k;
            if (!by_mass || cut == NEVER || sums[1] >= limit) {
                const float all = by_mass && cut > NEVER ? sums[1] : by_mass ? kept : sums[0];
                if (by_mass && cut > NEVER) row.least = from_key(to_key(cut) + 1);
                cut = find_cut(shared, turn, row, by_mass, limit, all);
                tail_of(shared, turn, row, cut, sums);
                ties = wanted = sums[2];
            }
            if (!by_mass) {
                wanted = top_k - sums[0];
                kept = sums[1] + wanted * weigh(cut, row.best, row.rate);
            } else
                wanted = fminf(wanted, fmaxf(ceilf((limit - sums[1]) / weigh(cut, row.best, row.rate)), 1.f));
        }
        if (cut > NEVER) last = wanted < ties ? last_tie(shared, turn, row, cut, (int)wanted, rank) : (float)V;
    }

    // E is at least u, so a token whose u is above its weight times exp(-record) loses, and takes no logarithm.
    // The 1% is far more than the errors of both exponentials; a weight that is 0 has no chance against the best token.
    float score[1] = {NEVER}, token[1] = {NEVER}, bound = -NEVER;
    const u32 position = (u32)positions[b];
    const u64 seed = (u64)seeds[b];
    for (int i = threadIdx.x; i - (int)(threadIdx.x % 32) < row.groups; i += THREADS) {
        const bool real = i < row.groups;
        const float4 x = four[real ? i : 0];
        const int id = row.first + 4 * i;
        u32 kept = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float one = j == 0 ? x.x : j == 1 ? x.y : j == 2 ? x.z : x.w;
            if (draws ? one > cut || (one == cut && (float)(id + j) <= last) : one == row.best && id + j < V)
                kept |= 1u << j;
        }
        kept = real ? kept : 0;
        if (!__any_sync(~0u, kept)) continue;
        float u[4];
        if (draws && kept) {
            const uint4 words = philox(seed, position, id / 4);
            u[0] = uniform(words.x), u[1] = uniform(words.y), u[2] = uniform(words.z), u[3] = uniform(words.w);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const float one = j == 0 ? x.x : j == 1 ? x.y : j == 2 ? x.z : x.w;
                const float weight = weigh(one, row.best, row.rate);
                if (weight < least_weight || u[j] > weight * bound) kept &= ~(1u << j);
            }
        }
        if (!__any_sync(~0u, kept)) continue;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float one = j == 0 ? x.x : j == 1 ? x.y : j == 2 ? x.z : x.w;
            if (!(kept >> j & 1)) continue;
            const float own = draws ? __fdiv_rn(one - row.best, temperature) - logf(-log1pf(-u[j])) : 0.f;
            if (own > score[0]) score[0] = own, token[0] = -(float)(id + j);
        }
        float record = score[0];
#pragma unroll
        for (int step = 16; step; step /= 2) record = fmaxf(record, __shfl_xor_sync(~0u, record, step));
        bound = 1.01f * __expf(-record);
    }
    const float mine = score[0];
    combine<true>(shared, turn, score);
    token[0] = mine == score[0] ? token[0] : NEVER;
    combine<true>(shared, turn, token);
    if (rank == 0 && threadIdx.x == 0) {
        const int drawn = token[0] > NEVER ? (int)-token[0] : 0;
        tokens[b] = drawn;
#if TOP_N >= 0
        logprob_ids[b * (1 + TOP_N)] = drawn;
        logprobs[b * (1 + TOP_N)] = lawful(static_cast<float>(from[drawn])) - raw_best - log_sum;
#endif
    }
    // No CTA exits while another CTA reads its memory.
    if (CLUSTER > 1) barrier();
}
