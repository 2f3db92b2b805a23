// Device code of `cluster`: a row's threshold, what lies above it, and the last tie that is taken.

// What a thread knows of its row.
struct Row {
    const float4* four;  // this CTA's part, -inf past its end
    int groups, first;   // groups of four; the part's first token
    float best, least, rate;
};

// Keeps of the row, or of what this warp held before (held >= 0), the tokens in (low, high] in the warp's segment, in
// their order.  Held is then their number, or -1 where they do not fit in some warp; returns that of the cluster.
__device__ __forceinline__ int keep(Shared& shared, int& turn, const Row& row, float low, float high, int& held) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float* segment = shared.segment[warp];
    int kept = 0;
    auto take = [&](float one, bool real) {
        const bool in = real && one > low && one <= high;
        const u32 lanes = __ballot_sync(~0u, in);
        const int place = kept + __popc(lanes & ((1u << lane) - 1));
        if (in && place < SEGMENT) segment[place] = one;
        kept += __popc(lanes);
    };
    if (held < 0) {
        for (int i = threadIdx.x; i - lane < row.groups; i += THREADS) {
            const bool real = i < row.groups;
            const float4 x = real ? row.four[i] : make_float4(NEVER, NEVER, NEVER, NEVER);
            take(x.x, real), take(x.y, real), take(x.z, real), take(x.w, real);
        }
    } else {
        for (int i = lane; i - lane < held; i += 32) {
            const float one = i < held ? segment[i] : NEVER;
            __syncwarp();  // all lanes have read before one writes to a place before theirs
            take(one, i < held);
        }
    }
    float sums[2] = {lane == 0 ? (float)kept : 0.f, lane == 0 && kept > SEGMENT ? 1.f : 0.f};
    if (lane == 0) shared.lengths[warp] = kept;
    combine<false>(shared, turn, sums);
    held = sums[1] > 0.f ? -1 : kept;
    return (int)sums[0];
}

// What the warps of the cluster hold, at most FEW tokens, in every CTA in the same order: in `found`.
__device__ __forceinline__ void share_held(Shared& shared, int held) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int offset = 0, length = 0;
    for (int w = 0; w < WARPS; ++w) {
        offset += w < warp ? shared.lengths[w] : 0;
        length += shared.lengths[w];
    }
    for (int i = lane; i < held; i += 32) shared.list[offset + i] = shared.segment[warp][i];
    if (threadIdx.x == 0) shared.length = (float)length;
    barrier();
    int start = 0;
    for (int rank = 0; rank < CLUSTER; ++rank) {
        const int count = (int)load_cluster(&shared.length, rank);
        if (threadIdx.x < count) shared.found[start + threadIdx.x] = load_cluster(&shared.list[threadIdx.x], rank);
        start += count;
    }
    barrier();  // the lists may be written again
}

// The least value with less than `limit` above it, in tokens or in mass; `all` is the number or the mass of the row.
// Two passes over the row leave so few tokens that the warps hold them, and the next passes read nothing else.
__device__ __forceinline__ float find_cut(Shared& shared, int& turn, const Row& row, bool by_mass, float limit,
                                          float all) {
    float high = row.best, low = from_key(to_key(row.least) - 1), above_high = 0.f, above_low = all;
    // exp(-24) of the largest weight: a million times less than what a vocabulary needs to matter.
    const float start = by_mass ? fmaxf(low, row.best - 34.f / row.rate) : low;
    int held = -1;
    for (int round = 0;; ++round) {
        const u32 top = to_key(high), bottom = to_key(low);
        if (top - bottom <= 1) return high;
        if (held >= 0 || (by_mass ? round > 1 : above_low - above_high <= CLUSTER * WARPS * SEGMENT / 2)) {
            const int n = keep(shared, turn, row, low, high, held);
            if (held >= 0 && n <= FEW) {
                share_held(shared, held);
                const float own = threadIdx.x < n ? shared.found[threadIdx.x] : NEVER;
                if (threadIdx.x < n) shared.weight[threadIdx.x] = by_mass ? weigh(own, row.best, row.rate) : 1.f;
                __syncthreads();
                float sum = above_high;
                for (int i = 0; i < n && threadIdx.x < n; ++i)
                    sum += shared.found[i] > own ? shared.weight[i] : 0.f;
                float cut[1] = {threadIdx.x < n && sum < limit ? -own : NEVER};
                combine<true>(shared, turn, cut);
                return cut[0] == NEVER ? high : -cut[0];
            }
        }
        float cuts[CUTS], above[CUTS] = {};
        const float width = high - low;
        const float guess = high - width * ((limit - above_high) / (above_low - above_high));
#pragma unroll
        for (int c = 0; c < CUTS; ++c) {
            const int off = c < 3 ? 3 - c : c - 3;
            const float far = off == 0 ? 0.f : off == 1 ? 1.f / 64 : off == 2 ? 1.f / 16 : 0.25f;
            const float step = c < 3 ? -far : far;
            cuts[c] = round == 0  ? row.best - (row.best - start) * ((7 - c) / 8.f)
                      : round < 4 ? fminf(fmaxf(guess + width * step, low), high)
                                  : from_key(bottom + (u32)(((u64)(top - bottom) * (c + 1)) >> 3));
        }
        auto count = [&](float one, float weight) {
#pragma unroll
            for (int c = 0; c < CUTS; ++c)
                if (one > cuts[c]) above[c] += weight;
        };
        if (held < 0) {
            for (int i = threadIdx.x; i < row.groups; i += THREADS) {
                const float4 x = row.four[i];
                float4 weight = make_float4(1.f, 1.f, 1.f, 1.f);
                if (by_mass)
                    weight = make_float4(weigh(x.x, row.best, row.rate), weigh(x.y, row.best, row.rate),
                                         weigh(x.z, row.best, row.rate), weigh(x.w, row.best, row.rate));
                count(x.x, weight.x), count(x.y, weight.y), count(x.z, weight.z), count(x.w, weight.w);
            }
        } else {
            for (int i = threadIdx.x % 32; i < held; i += 32) {
                const float one = shared.segment[threadIdx.x / 32][i];
                count(one, by_mass ? weigh(one, row.best, row.rate) : 1.f);
            }
        }
        combine<false>(shared, turn, above);
        const float more = held < 0 ? 0.f : above_high;  // of the tokens that no warp holds any more
        const float before = high;
#pragma unroll
        for (int c = 0; c < CUTS; ++c) {
            above[c] += cuts[c] < before ? more : 0.f;
            if (above[c] >= limit && cuts[c] > low) low = cuts[c], above_low = above[c];
            if (above[c] < limit && cuts[c] < high) high = cuts[c], above_high = above[c];
        }
    }
}

// Over the row: how many tokens are above the cut, their mass, and how many are equal to it.
__device__ __forceinline__ void tail_of(Shared& shared, int& turn, const Row& row, float cut, float (&sums)[3]) {
    sums[0] = sums[1] = sums[2] = 0.f;
    for (int i = threadIdx.x; i < row.groups; i += THREADS) {
        const float4 x = row.four[i];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float one = j == 0 ? x.x : j == 1 ? x.y : j == 2 ? x.z : x.w;
            if (one > cut) sums[0] += 1.f, sums[1] += weigh(one, row.best, row.rate);
            if (one == cut) sums[2] += 1.f;
        }
    }
    combine<false>(shared, turn, sums);
}

// The last of the first `wanted` (> 0) tokens that are equal to the cut, in the order of their ids.
__device__ __forceinline__ float last_tie(Shared& shared, int& turn, const Row& row, float cut, int wanted, u32 rank) {
    float counts[8] = {};
    for (int i = threadIdx.x; i < row.groups; i += THREADS) {
        const float4 x = row.four[i];
        const float ties = (float)((x.x == cut) + (x.y == cut) + (x.z == cut) + (x.w == cut));
#pragma unroll
        for (int r = 0; r < CLUSTER; ++r) counts[r] += r == rank ? ties : 0.f;
    }
    combine<false>(shared, turn, counts);
    int before = 0;
    for (int r = 0; r < CLUSTER; ++r) before += r < rank ? (int)counts[r] : 0;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float last[1] = {NEVER};
    for (int base = 0; base < row.groups; base += THREADS) {
        const int i = base + threadIdx.x;
        const float4 x = i < row.groups ? row.four[i] : make_float4(NEVER, NEVER, NEVER, NEVER);
        const int own = i < row.groups ? (x.x == cut) + (x.y == cut) + (x.z == cut) + (x.w == cut) : 0;
        int scan = own;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, scan, step);
            scan += lane >= step ? other : 0;
        }
        if (lane == 31) shared.lengths[warp] = scan;
        __syncthreads();
        int rank_of = before + scan - own;
        for (int w = 0; w < WARPS; ++w) {
            rank_of += w < warp ? shared.lengths[w] : 0;
            before += shared.lengths[w];
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float one = j == 0 ? x.x : j == 1 ? x.y : j == 2 ? x.z : x.w;
            if (i < row.groups && one == cut && ++rank_of == wanted) last[0] = (float)(row.first + 4 * i + j);
        }
    }
    combine<true>(shared, turn, last);
    return last[0];
}
