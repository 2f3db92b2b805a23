"""Made-up records of a GPU that nobody measured, for the tests of the report; every one says that it is synthetic."""

from dataclasses import asdict

import torch

from rooflab.bench.core.record import Record
from rooflab.bench.core.record_files import write
from rooflab.kernels import registry
from rooflab.reference.spec import get_scheme
from rooflab.roofline.device import get_device
from rooflab.roofline.model import bound

KEY = "synthetic-h200-16c-00000000"
OLD, NEW = "0123456789abcdef0123456789abcdef01234567", "fedcba9876543210fedcba9876543210fedcba98"
MEASURED = get_device("h200").ceilings(1.755e9)
CEILINGS = {**asdict(MEASURED), "kind": "measured"}
OPS = ("embedding", "gemm", "kv_cache_write", "paged_attention", "rmsnorm", "sample")
SCRIPT = '<script>document.title="broken"</script>'
TIMES_OVER_BOUND = {"naive": 3.0, "library": 1.5, "optimized": 1.3, "peer": 1.25}
GPU = {"name": "NVIDIA H200", "uuid": "GPU-synthetic", "memory_bytes": 150_000_000_000, "driver": "000.00-synthetic"}
ENVIRONMENT = {"machine_key": KEY, "cpu": "synthetic CPU", "memory_gib": 128, "python": "3.12.0", "gpu": GPU}
ENVIRONMENT |= {"torch": "2.11.0+cu130", "triton": "3.6.0"}
CLOCKS = {
    "readings": 40,
    "sm_clock_mhz": [345, 1980],
    "sm_clock_hz": 1.77e9,
    "sm_clock_range_hz": [1.755e9, 1.8e9],
    "throttle_names": ["software power cap"],
    "throttled": [],
    "memory_clock_mhz": [3201, 3201],
    "power_w": [212.5, 655.0],
    "temperature_c": [41, 63],
    "throttle_reasons": 0x4,
}
CASE = {"op": "gemm", "case_id": "M=1,N=4096,K=4096,layout=NT,bias=false", "scheme": "bf16"}
TUNED = {"kernel": "tensor_core", "role": "optimized", "backend": "triton"}


def make(kind, line, *, commit=NEW, status="OK", **fields):
    """A record of the synthetic machine; `line` orders it in time."""
    day = 1 if commit == OLD else 2
    stamp = f"2026-01-0{day}T{line // 3600:02d}:{line // 60 % 60:02d}:{line % 60:02d}+00:00"
    run = f"2026010{day}T000000Z-5e{kind[:2].encode().hex()}0{day}"
    common = {"environment": ENVIRONMENT, "device": "cuda", "timestamp": stamp, "dirty": commit == OLD}
    return Record(kind=kind, run_id=run, status=status, commit=commit, **{**common, **fields})


def timed(kernel, case, scheme, cost, line, commit, share):
    """A bench record with a time somewhat above the bound."""
    limit = bound(cost, MEASURED)
    traffic = kernel.traffic_of(registry.get_op(kernel.op).make_inputs(case, scheme, torch.device("meta"), 0), "cuda")
    moved = max(traffic.bytes if traffic else cost.bytes, cost.bytes)
    least = max(limit.seconds, moved / MEASURED.hbm_bytes_per_s)
    median = max(TIMES_OVER_BOUND[kernel.role] * least * share, 2e-6)
    optimized = kernel.role == "optimized"
    return make(
        "bench", line, commit=commit, op=kernel.op, kernel=kernel.name, role=kernel.role, backend=kernel.backend,
        case_id=case.id, case=dict(case), scheme=scheme.name, checked_by="gpu", basis="measured", timer="events",
        config={"BLOCK_M": 128, "num_warps": 8} if optimized else None, l2_state="cold", clocks=CLOCKS,
        latency_p20_ms=median * 0.985e3, latency_median_ms=median * 1e3, latency_p80_ms=median * 1.04e3,
        flops=cost.flops, least_bytes=cost.bytes, traffic_bytes=moved, intensity=cost.flops / moved,
        traffic_basis="counted" if optimized else "modelled", flops_per_s=cost.flops / median,
        bytes_per_s=moved / median, bound_ms=limit.seconds * 1e3, limiter=limit.limiter,
        bound_fraction=limit.seconds / median, ceilings=CEILINGS,
    )  # fmt: skip


def benches(commit=NEW, share=1.0, schemes=("bf16", "fp16"), ops=OPS):
    """Every kernel of some ops on the sizes of a model, in two schemes."""
    found = []
    for op in ops:
        spec = registry.get_op(op)
        for scheme in map(get_scheme, schemes):
            for case in spec.get_cases("llama3_8b")[:3]:
                cost = spec.cost_of(spec.make_inputs(case, scheme, torch.device("meta"), 0))
                for kernel in registry.kernels(op).values():
                    if "cuda" in kernel.devices:
                        found.append(timed(kernel, case, scheme, cost, len(found), commit, share))
    return found


def verdicts():
    """One A/B record of each outcome."""
    found = []
    for number, (verdict, effect, reason, status) in enumerate(
        (
            ("SAME", 0.001, "", "OK"),
            ("FASTER", -0.062, "", "OK"),
            ("SLOWER", 0.051, "", "OK"),
            ("UNRESOLVED", 0.015, "the readings fit both a difference and none", "OK"),
            ("INCORRECT", None, "error 31 times the tolerance", "INCORRECT"),
            ("MISSING", None, "side B has no such kernel", "INVALID"),
        )
    ):
        name = f"rung_{number}"
        own = {**CASE, **TUNED, "kernel": name, "verdict": verdict, "reason": reason, "checked_by": "gpu"}
        own["baseline"] = {"kernel": name, "commit": OLD, "latency_median_ms": 0.02}
        if effect is not None:
            own["metrics"] = {"effect": effect, "effect_low": effect - 0.01, "effect_high": effect + 0.01}
            own |= {"basis": "measured", "latency_median_ms": 0.02 * (1 + effect)}
        found.append(make("ab", number, status=status, **own))
    return found


def others():
    """Ceilings, compiled code, engine runs, checks in an interpreter, and results that must not be overlooked."""
    compiled = {
        "registers": 168,
        "spill_stores": 12,
        "shared_bytes": 163_840,
        "findings": ["warp_specialize was asked for and ignored"],
    }
    limit = {"ceilings": CEILINGS, "timer": "events", "backend": "cuda", "metrics": {"sm_clock_hz": 1.83e9}}
    run = {"model": "llama-3.1-8b", "dtype": "bfloat16", "prompts": 8, "gemm": "tensor_core", "rmsnorm": "fused"}
    served = {"ttft_p50_ms": 21.5, "itl_p50_ms": 6.41, "itl_p99_ms": 9.3, "output_tokens_per_s": 1210.0}
    laptop = {**ENVIRONMENT, "machine_key": "synthetic-laptop-2c-1", "gpu": None, "cpu": "synthetic laptop"}
    checks = {**CASE, **TUNED, "device": "cpu", "checked_by": "interpreter", "environment": laptop}
    impossible = "3.10 times the memory ceiling; likely cause: the inputs were in L2"
    own = {**TUNED, "kernel": SCRIPT, "op": "my_op", "case_id": "n=1", "scheme": "bf16"}
    return [
        make("ceiling", 1, kernel="hbm_read", bytes_per_s=9.5e11, config={"ctas": 132}, **limit),
        make("ceiling", 1, kernel="hbm_read", bytes_per_s=4.31e12, config={"ctas": 264}, **limit),
        make("ceiling", 1, kernel="launch events", **{**limit, "metrics": {"launch_floor_s": 1.9e-6}}),
        make("static", 2, compiled=(compiled,), predicted_ms=0.011, device=None, **CASE, **TUNED),
        make("engine", 3, case_id="generate", case=run, metrics=served, basis="measured"),
        make("check", 4, **checks),
        make("bench", 900, status="TIMEOUT", reason="no end after 60 s", **CASE, **{**TUNED, "kernel": "hangs"}),
        make("bench", 901, status="INVALID", reason=impossible, **CASE, **{**TUNED, "kernel": "too_fast"}),
        make("bench", 902, status="INCORRECT", reason=f"{SCRIPT} is wrong", **own),
        make("bench", 1, commit=OLD, status="RUNTIME_ERROR", reason="fixed since", **CASE, **TUNED),
    ]


def write_synthetic(folder):
    """Files of every kind of record of the synthetic GPU; the folder."""
    write(folder / "synthetic-old.jsonl", *benches(OLD, 1.1, ("bf16",), ("gemm", "rmsnorm")))
    write(folder / "synthetic-new.jsonl", *benches())
    write(folder / "synthetic-rest.jsonl", *verdicts(), *others())
    return folder
