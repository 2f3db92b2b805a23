"""Over fused: several vectors of 16 bytes a thread under way, short rows side by side, a persistent grid, and outputs
quantised in the same pass (`lib/rows.cu`)."""

from __future__ import annotations

from torch import Tensor

from rooflab.kernels.launcher import kernel
from rooflab.kernels.lib.rows import Config, launch, tuning, why_not_taken
from rooflab.reference.gelu_and_mul import SPEC


@kernel(
    backend="cuda", min_sm=90, devices=("cuda",), requires=("cupy",), traffic=SPEC.least, tuning=tuning("gelu_and_mul"),
    unsupported=lambda inputs: why_not_taken("gelu_and_mul", inputs.x, inputs.x.shape[-1] // 2),
    over="fused", shows={"": (
        "LDG_E_NA_128 in (4, 8) and LDG == LDG__128; STG_E_128 == global_store == 2 and barrier == 0; "
        "LDG_E_NA_128 >= 2 * below.LDG_E_128"
    )},
)  # fmt: skip
def cluster(x: Tensor, out: Tensor, scale: Tensor | None, *, quantize: str | None, config: Config) -> None:
    """gelu(gate) * up, in its tanh form, in fp32, rounded once."""
    launch("gelu_and_mul", x, out, second=x[:, out.shape[1] :], scale=scale, config=config)
