"""Tests whether the A/B can be trusted here: it must find no difference in equal code, and an injected slowdown.

The test compares every kernel with itself, and then with itself slowed down (`ab_worker.Slowed`).  The A/A outcomes
become the noise floor of the machine, and later runs compare their verdicts with this floor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rooflab.bench.ab.ab_run import AbResult, run
from rooflab.bench.ab.pairs import AbSettings
from rooflab.bench.ab.sides import ROOT, Comparison, Side, Target
from rooflab.bench.ab.verdict import effects_of, floor_of, remember_floors
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
INJECTED = {"cpu": 0.20, "cuda": 0.05}
"""The default injected slowdown.  It is larger on a CPU, because times of processes differ by more than 5% there."""
QUIET = 0.25
"""The verdict SLOWER is required only if the noise floor is below this share of the injected slowdown."""


@dataclass(frozen=True)
class SelfTest:
    """The result of the self-test."""

    repeats: tuple[AbResult, ...]
    """The results of the A/A runs, in which each kernel is compared with itself."""
    injected: AbResult
    slow_down: float
    floors: Mapping[str, float | None]
    """Noise floors by comparison, only from the A/A runs of this self-test."""

    @property
    def saw_nothing(self) -> bool:
        """Whether no slowed kernel was called SLOWER.  Then the A/A runs without a difference prove nothing."""
        return not any(outcome.verdict == "SLOWER" for outcome in self.injected.outcomes)

    @property
    def faults(self) -> list[str]:
        """The wrong verdicts, one sentence each."""
        same = [outcome for result in self.repeats for outcome in result.outcomes]
        alarms = [outcome for outcome in same if outcome.verdict in ("FASTER", "SLOWER")]
        sentences = [f"{outcome.key}: A against A is called {outcome.verdict}" for outcome in alarms]
        for outcome in (*same, *self.injected.outcomes):
            if outcome.verdict in ("INCORRECT", "FAILED", "MISSING", "INVALID"):
                sentences.append(f"{outcome.key}: {outcome.verdict}: {outcome.reason}")
        for outcome in self.injected.outcomes:
            floor = self.floors.get(outcome.key)
            quiet = floor is not None and floor < QUIET * self.slow_down
            called = f"{outcome.key}: slowed by {self.slow_down:.0%} and called {outcome.verdict}"
            if outcome.verdict in ("SAME", "FASTER"):
                sentences.append(called)
            elif quiet and outcome.verdict == "UNRESOLVED":
                sentences.append(f"{called}, at a floor of {floor:.1%}")
        return sentences


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
    """Compares each (op, kernel) with itself `repeats` times, then with a slowed copy, on the last case of `suite`.

    There are `repeats` + 1 runs; each run has the time `settings.budget_s`.  The noise floors are remembered for this
    machine.  Raises `ValueError` on an unknown name.
    """
    slow_down = INJECTED[settings.device.split(":")[0]] if slow_down is None else slow_down
    targets = {}
    for op, name in pairs:
        registry.get_kernel(op, name)
        target = Target(op, name, registry.get_op(op).get_cases(suite)[-1].id, scheme)
        targets[target.id] = target
    commit, dirty = git_state(files[0] if files else ROOT)
    plain = Side("A", targets, commit=commit, dirty=dirty, files=files)
    same = Comparison(plain, replace(plain, label="A again"))
    # A floor from an earlier run must not change the floors that this run finds.  Nor must the equal device code
    # of both sides replace their times: this run tests the times.
    # One check is enough: all rounds run the same tree, and fp64 oracles took 75 s of a first round's 174 s.
    rounds = [
        run(same, replace(settings, seed=settings.seed + 2 * turn), done, {}, checked=turn > 0, by_activity=False)
        for turn in range(repeats)
    ]
    slowed = Comparison(plain, replace(plain, label=f"A slowed by {slow_down:.0%}", slow_down=slow_down))
    settings = replace(settings, seed=settings.seed + 2 * repeats)
    injected = run(slowed, settings, done, {}, checked=True, by_activity=False)
    seen: dict[str, list[tuple[float, float]]] = {key: [] for key in targets}
    for result in rounds:
        if key := result.environments.get("B", {}).get("machine_key"):
            remember_floors(str(key), result.outcomes)
        for outcome in result.outcomes:
            seen[outcome.key] += effects_of(outcome)
    return SelfTest(tuple(rounds), injected, slow_down, {key: floor_of(effects) for key, effects in seen.items()})
