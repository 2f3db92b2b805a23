"""Tests the A/B method on this machine: it must find an injected slowdown, and no difference in equal code.

The test compares every kernel with itself (A/A), and then with a slowed copy (`ab_worker.Slowed`).  The A/A results
give the machine's noise floor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rooflab.bench.ab.ab_run import AbResult, run
from rooflab.bench.ab.pairs import AbSettings
from rooflab.bench.ab.sides import Comparison, Side, Target
from rooflab.bench.ab.verdict import effects_of, floor_of, remember_floors
from rooflab.bench.base.git import ROOT
from rooflab.bench.core import git_state
from rooflab.kernels import registry

KERNELS = (
    ("gemm", "library"),
    ("flash_attention", "library"),
    ("rmsnorm", "naive"),
    ("silu_and_mul", "library"),
    ("rope", "naive"),
    ("sample", "naive"),
)
"""The default kernels of the self-test: kernels bound by compute, kernels bound by memory, and short kernels."""
INJECTED_SLOWDOWN = {"cpu": 0.20, "cuda": 0.05}
"""The default injected slowdown.  It is larger on a CPU, because times of processes differ by more than 5% there."""
MAX_FLOOR_SHARE = 0.25
"""The verdict SLOWER is required only if the noise floor is below this share of the injected slowdown."""


@dataclass(frozen=True)
class SelfTest:
    """Holds the result of the self-test."""

    repeats: tuple[AbResult, ...]
    """The results of the A/A runs, in which each kernel is compared with itself."""
    injected: AbResult
    slow_down: float
    floors: Mapping[str, float | None]
    """Noise floors by comparison, only from the A/A runs of this self-test."""

    @property
    def saw_nothing(self) -> bool:
        """Returns whether the test missed every slowdown.  Then A/A runs without a difference prove nothing."""
        return not any(outcome.verdict == "SLOWER" for outcome in self.injected.outcomes)

    @property
    def faults(self) -> list[str]:
        """Returns the wrong verdicts, one sentence each."""
        equal_outcomes = [outcome for result in self.repeats for outcome in result.outcomes]
        false_alarms = [outcome for outcome in equal_outcomes if outcome.verdict in ("FASTER", "SLOWER")]
        fault_texts = [f"{outcome.key}: A against A is called {outcome.verdict}" for outcome in false_alarms]
        for outcome in (*equal_outcomes, *self.injected.outcomes):
            if outcome.verdict in ("INCORRECT", "FAILED", "MISSING", "INVALID"):
                fault_texts.append(f"{outcome.key}: {outcome.verdict}: {outcome.reason}")
        for outcome in self.injected.outcomes:
            noise_floor = self.floors.get(outcome.key)
            is_low_noise = noise_floor is not None and noise_floor < MAX_FLOOR_SHARE * self.slow_down
            verdict_text = f"{outcome.key}: slowed by {self.slow_down:.0%} and called {outcome.verdict}"
            if outcome.verdict in ("SAME", "FASTER"):
                fault_texts.append(verdict_text)
            elif is_low_noise and outcome.verdict == "UNRESOLVED":
                fault_texts.append(f"{verdict_text}, at a floor of {noise_floor:.1%}")
        return fault_texts


def self_test(
    pairs: Sequence[tuple[str, str]],
    settings: AbSettings,
    suite: str,
    scheme: str,
    *,
    repeats: int = 1,
    slow_down: float | None = None,
    done: Callable[[str], None] = lambda text: None,
    files: tuple[Path, ...] = (),
) -> SelfTest:
    """Compares each kernel with itself `repeats` times, and then with a slowed copy, on the last case of `suite`.

    There are `repeats + 1` runs, and each run takes up to `settings.budget_s`.  The noise floors are stored for this
    machine.  Raises `ValueError` on an unknown name."""
    slow_down = INJECTED_SLOWDOWN[settings.device.split(":")[0]] if slow_down is None else slow_down
    targets = {}
    for op, name in pairs:
        registry.get_kernel(op, name)
        kernel_target = Target(op, name, registry.get_op(op).get_cases(suite)[-1].id, scheme)
        targets[kernel_target.id] = kernel_target
    git_commit, is_dirty = git_state(files[0] if files else ROOT)
    plain_side = Side("A", targets, commit=git_commit, dirty=is_dirty, files=files)
    aa_sides = Comparison(plain_side, replace(plain_side, label="A again"))
    # A floor from an earlier run must not change the floors that this run finds.  Nor must the equal device code
    # of both sides replace their times: this run tests the times.
    # One check is enough: all rounds run the same tree, and fp64 oracles took 75 s of a first round's 174 s.
    rounds = [
        run(aa_sides, replace(settings, seed=settings.seed + 2 * index), done, {}, checked=index > 0, by_activity=False)
        for index in range(repeats)
    ]
    slow_sides = Comparison(plain_side, replace(plain_side, label=f"A slowed by {slow_down:.0%}", slow_down=slow_down))
    settings = replace(settings, seed=settings.seed + 2 * repeats)
    slow_result = run(slow_sides, settings, done, {}, checked=True, by_activity=False)
    samples: dict[str, list[tuple[float, float]]] = {key: [] for key in targets}
    for result in rounds:
        if key := result.environments.get("B", {}).get("machine_key"):
            remember_floors(str(key), result.outcomes)
        for outcome in result.outcomes:
            samples[outcome.key] += effects_of(outcome)
    return SelfTest(tuple(rounds), slow_result, slow_down, {key: floor_of(effects) for key, effects in samples.items()})
