"""When speculation pays: the times of drafts and of the step that verifies them, and the acceptance at which both are
worth a step without drafts.

A draft of k tokens, each of which is accepted with chance c if those before it were, gives (1 - c**(k+1)) / (1 - c)
tokens a step (Leviathan et al., arXiv 2211.17192).  It breaks even where that is the step's time over a plain step's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from scipy.optimize import brentq

from rooflab.bench.latency.step_model import KernelTimes, StepModel, StepWork
from rooflab.engine.speculate.drafter import Speculation
from rooflab.roofline.architecture import get_architecture


def tokens_a_step(chance: float, drafted: int) -> float:
    """Mean tokens of a step with a draft of `drafted` tokens."""
    return float(sum(chance**place for place in range(drafted + 1)))


def break_even(ratio: float, drafted: int) -> float | None:
    """The chance of acceptance at which a step of `ratio` plain steps' time gives `ratio` tokens; None if none does."""
    if ratio > drafted + 1:
        return None
    return float(brentq(lambda chance: tokens_a_step(chance, drafted) - ratio, 0.0, 1.0)) if ratio > 1 else 0.0


@dataclass(frozen=True)
class SpeculativeSteps:
    """A model of steps with the time of the drafts that they verify.

    The draft of an n-gram takes no time.  A draft model takes a step for each token of a draft, and one more that
    computes what the model computes; so does an EAGLE head, whose step has one layer.
    """

    steps: StepModel
    draft: KernelTimes | None = None

    @property
    def basis(self) -> str:
        """Whose times."""
        return self.steps.basis

    def seconds(self, work: StepWork) -> float:
        """Seconds of a step, its drafts' included."""
        return self.steps.seconds(work) + self.draft_s(work)

    def draft_s(self, work: StepWork) -> float:
        """Seconds of the drafts that a step verifies, and of following its tokens."""
        if self.draft is None:
            return 0.0
        places = -(-work.drafted // work.decodes) if work.decodes else 0
        own = places * self.draft.seconds(StepWork(work.decodes, work.keys, (), work.decodes)) if places else 0.0
        return own + self.draft.seconds(replace(work, drawn=0))


def speculative(asked: Speculation, steps: StepModel) -> SpeculativeSteps:
    """The steps with the drafts that `asked` names; a draft model is a preset.  Raises `ValueError` if the times of
    `steps` are measured ones, which tell nothing of another model."""
    if asked.kind == "ngram":
        return SpeculativeSteps(steps)
    if not isinstance(steps, KernelTimes):
        raise ValueError(f"speculate: expected ngram with measured steps, got {asked.kind}")
    beside = replace(steps, host_ms=0.0)
    if asked.kind == "draft":
        arch = get_architecture(str(asked.draft))
        if arch.vocab_size != steps.arch.vocab_size:
            raise ValueError(f"draft: expected {steps.arch.vocab_size} tokens, got {arch.vocab_size} ({arch.name})")
        return SpeculativeSteps(steps, replace(beside, arch=arch))
    return SpeculativeSteps(steps, replace(beside, arch=replace(steps.arch, num_layers=1)))


def priced(model: SpeculativeSteps, batch: int, context: int, drafted: int) -> dict[str, float | None]:
    """Milliseconds of a plain step, of one that verifies drafts of `drafted` tokens, and of drafting, and the
    acceptance at which both are worth the same, for `batch` sequences of `context` tokens."""
    keys = batch * context
    work = StepWork(batch, keys, (), batch * (1 + drafted), batch * drafted)
    plain, verify = model.steps.seconds(StepWork(batch, keys, (), batch)), model.steps.seconds(work)
    draft = model.draft_s(work)
    return {
        "plain_ms": 1e3 * plain,
        "verify_ms": 1e3 * verify,
        "draft_ms": 1e3 * draft,
        "break_even_acceptance": break_even((verify + draft) / plain, drafted),
    }
