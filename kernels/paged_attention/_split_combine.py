"""Device code of `split_kv`: the second launch, which adds the parts that the shares leave of a head."""

from __future__ import annotations

SOURCE = r"""
constexpr int COMBINERS = 4, NUMBERS = (D + 31) / 32;  // warps that share a head's parts, and values d per lane

// One query head: its parts, weighted by their log-sum-exps and added in order.
extern "C" __global__ void __launch_bounds__(32 * COMBINERS)
combine(const float* partial, const float* partial_lse, const int* lens, const float* sinks, u16* out, float* lse,
        int B, int window, int ctas, i64 out_t, i64 out_h, i64 lse_t, i64 lse_h) {
    __shared__ i64 sums[2][COMBINERS];
    __shared__ float totals[COMBINERS], numbers[COMBINERS][NUMBERS * 32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, b = blockIdx.x, head = blockIdx.y;
    i64 before = 0, units = 0;
    for (int i = threadIdx.x; i < B; i += 32 * COMBINERS) {
        const int own = units_of(lens[i], window);
        units += own;
        before += i < b ? own : 0;
    }
    for (int step = 16; step; step /= 2) {
        before += __shfl_xor_sync(~0u, before, step);
        units += __shfl_xor_sync(~0u, units, step);
    }
    if (lane == 0) sums[0][warp] = before, sums[1][warp] = units;
    __syncthreads();
    before = units = 0;
    for (int w = 0; w < COMBINERS; ++w) before += sums[0][w], units += sums[1][w];
    before *= HEAD_SETS, units *= HEAD_SETS;

    const int mine = units_of(lens[b], window);
    const int virtual_head = head / GROUP * ROW_TILES + head % GROUP / 16, row = head % GROUP % 16;
    u16* to = out + b * out_t + head * out_h;
    float lse2 = -INFINITE;
    if (mine == 0) {
        sink_in(lse2, sinks, head);
        for (int d = threadIdx.x; d < D; d += 32 * COMBINERS) to[d] = 0;
        if (lse && threadIdx.x == 0) lse[b * lse_t + head * lse_h] = lse2 * LN2;
        return;
    }
    const int shares = shares_of(units, ctas);
    const i64 segment = before + (i64)(virtual_head / WARPS) * mine;
    const int first = owner_of(segment, units, shares), last = owner_of(segment + mine - 1, units, shares);
    if (first == last) return;  // one CTA had the whole segment

    auto place = [&](int g) {
        const int slot = slot_of(segment, share_start(g, units, shares));
        return ((i64)(g * 2 + slot) * WARPS + virtual_head % WARPS) * ROWS + row;
    };
    float most = -INFINITE;
    for (int g = first + lane; g <= last; g += 32) most = fmaxf(most, partial_lse[place(g)]);
    for (int step = 16; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    const float shift = most == -INFINITE ? 0.f : most;
    float total = 0, sum[NUMBERS] = {};
#pragma unroll 4
    for (int g = first + warp; g <= last; g += COMBINERS) {
        const i64 at = place(g);
        const float weight = exp2_of(partial_lse[at] - shift);
        total += weight;
#pragma unroll
        for (int i = 0; i < NUMBERS; ++i)
            if (D % 32 == 0 || i * 32 + lane < D) sum[i] += weight * partial[at * D + i * 32 + lane];
    }
    if (lane == 0) totals[warp] = total;
    for (int i = 0; i < NUMBERS; ++i) numbers[warp][i * 32 + lane] = sum[i];
    __syncthreads();
    total = 0;
    for (int w = 0; w < COMBINERS; ++w) total += totals[w];
    if (total > 0) lse2 = most + log2_of(total);
    const float by = sink_in(lse2, sinks, head) / (total > 0 ? total : 1.f);
    for (int d = threadIdx.x; d < D; d += 32 * COMBINERS) {
        float value = 0;
        for (int w = 0; w < COMBINERS; ++w) value += numbers[w][d];
        to[d] = (u16)pack(value * by, 0.f);
    }
    if (lse && threadIdx.x == 0) lse[b * lse_t + head * lse_h] = lse2 * LN2;
}
"""
