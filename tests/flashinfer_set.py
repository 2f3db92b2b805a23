"""A small flashinfer-bench data set, written from the documented schema."""

import json

ATTEND = """
def attend(q, k, v, scale, causal):
    heads = q.shape[1] // k.shape[1]
    out = torch.zeros_like(q, dtype=torch.float32)
    for head in range(q.shape[1]):
        for row in range(q.shape[0]):
            seen = min(k.shape[0], row + 1 + k.shape[0] - q.shape[0]) if causal else k.shape[0]
            if seen > 0:
                scores = k[:seen, head // heads].float() @ q[row, head].float() * scale
                out[row, head] = torch.softmax(scores, 0) @ v[:seen, head // heads].float()
    return out
"""
RMSNORM = """
EPSILON = 1e-5
def norm(x, weight):
    eps = 1e-5
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
"""
REFERENCES = {
    "gemm_n48_k32": "def run(A, B):\n    return A @ B.T",
    "rmsnorm_h64": RMSNORM + "def run(hidden_states, weight):\n    return norm(hidden_states.float(), weight)",
    "fused_add_rmsnorm_h64": RMSNORM + "def run(hidden_states, residual, weight):\n"
    "    return norm(hidden_states.float() + residual.float(), weight).to(hidden_states.dtype)",
    "gqa_paged_decode_h4_kv2_d64_ps16": ATTEND
    + """
def run(q, k_cache, v_cache, kv_indptr, kv_indices, kv_last_page_len, sm_scale):
    out = torch.zeros_like(q, dtype=torch.float32)
    for b in range(q.shape[0]):
        pages = kv_indices[kv_indptr[b]:kv_indptr[b + 1]].long()
        if len(pages):
            keep = (len(pages) - 1) * k_cache.shape[1] + int(kv_last_page_len[b])
            k, v = (cache[pages].flatten(0, 1)[:keep] for cache in (k_cache, v_cache))
            out[b:b + 1] = attend(q[b:b + 1], k, v, sm_scale, False)
    return {"output": out, "lse": torch.zeros(q.shape[:2])}
""",
    "gqa_ragged_prefill_causal_h4_kv2_d64": ATTEND
    + """
def run(q, k, v, qo_indptr, kv_indptr, sm_scale):
    spans = zip(qo_indptr[:-1], qo_indptr[1:], kv_indptr[:-1], kv_indptr[1:])
    return torch.cat([attend(q[a:b], k[c:d], v[c:d], sm_scale, True) for a, b, c, d in spans]), torch.zeros(q.shape[:2])
""",
    "top_k_top_p_sampling_from_probs_v97": """
def run(probs, top_k, top_p):
    tokens = []
    for row, k, p in zip(probs, top_k, top_p):
        values, order = row.sort(descending=True)
        values[int(k):] = 0
        values = values / values.sum()
        values[values.cumsum(0) - values > p] = 0
        tokens.append(order[torch.multinomial(values, 1)])
    return torch.cat(tokens).to(torch.int32)
""",
    "rope_with_cos_sin_cache_neox_style_d64": """
def run(q, k, cos_sin_cache, positions):
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, -1)
    def turn(x):
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
    return turn(q), turn(k)
""",
}


def tensor(dtype, *shape):
    return {"shape": list(shape) or None, "dtype": dtype}


def define(name, op_type, axes, inputs, outputs):
    """A definition as its file holds it; an axis is const where it has a number, else var."""
    sizes = {axis: {"type": "const", "value": size} if size else {"type": "var"} for axis, size in axes.items()}
    reference = "import torch\n" + REFERENCES.get(name, "def run(*arguments):\n    raise RuntimeError('not for this')")
    described = {"name": name, "op_type": op_type, "tags": ["status:verified"], "description": "", "constraints": []}
    return described | {"axes": sizes, "inputs": inputs, "outputs": outputs, "reference": reference}


def definitions():
    heads = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 64}
    rows = {"batch_size": None, "hidden_size": 64}
    norm = {name: tensor("float32", "batch_size", "hidden_size") for name in ("hidden_states", "residual")}
    half = {name: tensor("float16", "batch_size", "hidden_size") for name in ("hidden_states", "residual")}
    q = tensor("float32", "total_q", "num_qo_heads", "head_dim")
    attention = {"output": q, "lse": tensor("float32", "total_q", "num_qo_heads")}
    cache = tensor("float32", "num_pages", "page_size", "num_kv_heads", "head_dim")
    offsets, scale = tensor("int32", "len_indptr"), tensor("float32")
    keys = tensor("float32", "total_kv", "num_kv_heads", "head_dim")
    paging = {"kv_indptr": offsets, "kv_indices": tensor("int32", "num_kv_indices")}
    last = {"kv_last_page_len": tensor("int32", "total_q"), "sm_scale": scale}
    ragged = {"qo_indptr": offsets, "kv_indptr": offsets, "sm_scale": scale}
    pages = {"num_pages": None, "page_size": 16, "len_indptr": None, "num_kv_indices": None}
    turned = {name: tensor("float32", "T", f"H_{name}", "D") for name in ("q", "k")}
    tables = {"cos_sin_cache": tensor("float32", "max_seq_len", "D"), "positions": tensor("int64", "T")}
    drawn = {"probs": tensor("float32", "batch_size", "vocab_size"), "top_k": tensor("int32", "batch_size")}
    drawn |= {"top_p": tensor("float32", "batch_size")}
    square = {"A": tensor("float16", "M", "K"), "B": tensor("float16", "N", "K")}
    weight = tensor("float32", "hidden_size")
    mla = {"q_nope": tensor("bfloat16", "T"), "ckv_cache": tensor("bfloat16", "T")}
    fp8 = {name: value | {"dtype": "float8_e4m3fn"} for name, value in square.items()}
    out = {"output": norm["hidden_states"]}
    return [
        define("gemm_n48_k32", "gemm", {"M": None, "N": 48, "K": 32}, square, {"C": tensor("float16", "M", "N")}),
        define("gemm_fp8_n48_k32", "gemm", {"M": None, "N": 48, "K": 32}, fp8, {"C": tensor("float16", "M", "N")}),
        define("rmsnorm_h64", "rmsnorm", rows, {"hidden_states": norm["hidden_states"], "weight": weight}, out),
        define(
            "fused_add_rmsnorm_h64",
            "rmsnorm",
            rows,
            half | {"weight": tensor("float16", "hidden_size")},
            {"output": half["hidden_states"]},
        ),
        define(
            "gqa_paged_decode_h4_kv2_d64_ps16",
            "gqa_paged",
            {"total_q": None, **heads, **pages},
            {"q": q, "k_cache": cache, "v_cache": cache} | paging | last,
            attention,
        ),
        define(
            "gqa_ragged_prefill_causal_h4_kv2_d64",
            "gqa_ragged",
            {"total_q": None, "total_kv": None, "len_indptr": None, **heads},
            {"q": q, "k": keys, "v": keys} | ragged,
            attention,
        ),
        define(
            "top_k_top_p_sampling_from_probs_v97",
            "sampling",
            {"batch_size": None, "vocab_size": 97},
            drawn,
            {"samples": tensor("int32", "batch_size")},
        ),
        define(
            "rope_with_cos_sin_cache_neox_style_d64",
            "rope",
            {"T": None, "H_q": None, "H_k": None, "max_seq_len": None, "D": 64},
            turned | tables,
            {"q_out": turned["q"], "k_out": turned["k"]},
        ),
        define("mla_paged_decode_h16", "mla_paged", {"T": None}, mla, {"output": tensor("bfloat16", "T")}),
    ]


AXES = {
    "gemm_n48_k32": {"M": 7},
    "rmsnorm_h64": {"batch_size": 5},
    "fused_add_rmsnorm_h64": {"batch_size": 5},
    "gqa_paged_decode_h4_kv2_d64_ps16": {"total_q": 3, "num_pages": 9, "len_indptr": 4, "num_kv_indices": 7},
    "gqa_ragged_prefill_causal_h4_kv2_d64": {"total_q": 11, "total_kv": 17, "len_indptr": 4},
    "top_k_top_p_sampling_from_probs_v97": {"batch_size": 3},
    "rope_with_cos_sin_cache_neox_style_d64": {"T": 6, "H_q": 4, "H_k": 2, "max_seq_len": 32},
}


def workload(definition, axes, number=0, **sources):
    random = {"type": "random"}
    inputs = dict.fromkeys(definition["inputs"], random) | sources
    uuid = f"{definition['name']}-{number}"
    return {"definition": definition["name"], "workload": {"uuid": uuid, "axes": axes, "inputs": inputs}}


def trace(definition, axes, solution, status="PASSED", latency_ms=0.25, second=0):
    environment = {"hardware": "NVIDIA_H200", "libs": {"torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0"}}
    evaluation = {
        "status": status,
        "environment": environment,
        "timestamp": f"2026-03-01T10:00:{second:02d}",
        "log": "",
    }
    evaluation |= {"correctness": None, "performance": None}
    if status == "PASSED":
        evaluation["correctness"] = {"max_relative_error": 0.01, "max_absolute_error": "Infinity"}
        performance = {"latency_ms": latency_ms, "reference_latency_ms": 0.5, "speedup_factor": 0.5 / latency_ms}
        evaluation["performance"] = performance
    return workload(definition, axes) | {"solution": solution, "evaluation": evaluation}


def write_lines(path, *values):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def write_data_set(root):
    """A folder with every definition, a workload of each that can be mapped, and three traces."""
    for definition in definitions():
        path = root / "definitions" / definition["op_type"] / f"{definition['name']}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(definition, indent=1))
        axes = AXES.get(definition["name"])
        if axes:
            line = workload(definition, axes) | {"solution": None, "evaluation": None}
            write_lines(root / "workloads" / definition["op_type"] / f"{definition['name']}.jsonl", line)
    gemm, _, norm, *_ = definitions()
    results = [
        trace(gemm, {"M": 7}, "fast_v1"),
        trace(gemm, {"M": 7}, "wrong_v2", "INCORRECT_NUMERICAL", second=9),
        trace(norm | {"name": "absent"}, {"batch_size": 5}, "lost"),
    ]
    write_lines(root / "traces" / "someone" / "gemm" / "gemm_n48_k32.jsonl", *results)
    return root
