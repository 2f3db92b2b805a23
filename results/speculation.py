"""When n-gram speculation pays on this machine: on texts whose answers repeat the prompt and on texts whose answers do
not, and the acceptance at which it breaks even, predicted beside measured.

    python results/speculation.py --rounds 5 --threads 1 --out results/speculation

One process holds two engines of the same weights, one that drafts and one that does not, and they take turns on each
text, so that a change of the machine meets both.  A text's ratio is the median over the rounds of (TPOT without) over
(TPOT with).  The prediction comes from batches of an engine that does not draft: fitted, their steps give the time of a
step of k + 1 tokens.  The measured break-even comes from drafts that are right with a set chance at each token.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from rooflab.bench.core.environment import Environment
from rooflab.bench.core.record import Record
from rooflab.bench.core.record_files import RunWriter
from rooflab.bench.latency.calibrate import calibrated
from rooflab.bench.latency.speculation import SpeculativeSteps, break_even, priced
from rooflab.engine.llm import LLM, SamplingParams
from rooflab.engine.sequence import Sequence
from rooflab.engine.speculate.drafter import Drafter
from rooflab.engine.speculate.lengths import Lengths

TEXTS = Path(__file__).parent / "speculation" / "texts"
CHANCES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.6)
"""Of acceptance, for the measured break-even."""


class ByChance(Drafter):
    """Drafts the tokens that a run before gave; those at the same places are right in each run."""

    def __init__(self, answer: list[int], chance: float, seed: int):
        draw = random.Random(seed)
        self._tokens = [token if draw.random() < chance else token ^ 1 for token in answer]

    def wants(self, rows: list[Sequence], lengths: Lengths) -> list[tuple[Sequence, int]]:  # type: ignore[override]
        """As many tokens as a draft may have."""
        return [(one, lengths.most) for one in rows]

    def draft(self, drafting: list[tuple[Sequence, int]]) -> dict[Sequence, list[int]]:  # type: ignore[override]
        """A wrong token differs from the right one in its last bit."""
        return {one: self._tokens[len(one.output_ids) :][:most] or [0] for one, most in drafting}


def tpot_ms(llm: LLM, text: str, new_tokens: int) -> tuple[float, list[int], tuple[int, int, int]]:
    """The time per token of one answer, the answer, and its steps with drafts, drafted and accepted tokens."""
    counts, step = [0, 0, 0], llm.core.step

    def counting() -> Any:
        got = step()
        if llm.core.speculator is not None and (found := llm.core.speculator.last) is not None:
            counts[0] += 1
            counts[1] += found.drafted
            counts[2] += found.accepted
        return got

    llm.core.step = counting  # type: ignore[method-assign]
    try:
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        output = llm.generate([[{"role": "user", "content": text}]], params)[0]
    finally:
        llm.core.step = step  # type: ignore[method-assign]
    assert output.timeline.tpot_ms is not None, "an answer has several tokens"
    return output.timeline.tpot_ms, output["token_ids"], (counts[0], counts[1], counts[2])


def interleaved(plain: LLM, drafting: LLM, text: str, new_tokens: int, rounds: int) -> dict[str, Any]:
    """Both engines on one text in turns; which comes first changes."""
    ratios, without, counts = [], [], (0, 0, 0)
    for number in range(rounds + 1):
        pair = {}
        for llm in (plain, drafting) if number % 2 else (drafting, plain):
            pair[llm is drafting] = tpot_ms(llm, text, new_tokens)
        if number:  # the first round computes the prompt, which the prefix cache then has
            ratios.append(pair[False][0] / pair[True][0])
            without.append(pair[False][0])
            counts = pair[True][2]
    steps, drafted, accepted = counts
    return {
        "ratio": median(ratios),
        "least": min(ratios),
        "most": max(ratios),
        "tpot_ms": median(without),
        "steps": steps,
        "drafted": drafted,
        "accepted": accepted,
        "tokens_per_step": new_tokens / (new_tokens - accepted),
    }


def measured_break_even(plain: LLM, drafting: LLM, text: str, new_tokens: int, rounds: int) -> dict[str, Any]:
    """The acceptance at which the ratio of times crosses 1, on a line between the two points beside it.

    A point's acceptance is the chance that would give as many tokens a step as the drafts of that run did.
    """
    _, answer, _ = tpot_ms(plain, text, new_tokens)
    assert drafting.core.speculator is not None, "the engine drafts"
    runner, lengths, points = drafting.core.speculator.runner, drafting.core.speculator.lengths, []
    own = runner.drafter
    lengths.adapts = False
    for chance in CHANCES:
        runner.drafter = ByChance(answer, chance, 7)
        row = interleaved(plain, drafting, text, new_tokens, rounds)
        points.append((break_even(row["tokens_per_step"], lengths.most) or 0.0, row["ratio"]))
    runner.drafter, lengths.adapts = own, True
    points.sort()
    acceptances, ratios = zip(*points, strict=True)
    found = float(np.interp(1.0, np.maximum.accumulate(ratios), acceptances))
    return {"points": points, "break_even": found}


def study(rounds: int, new_tokens: int, drafted: int) -> dict[str, Any]:
    """The whole study."""
    plain = LLM(device="cpu", max_num_seqs=1, max_model_len=1024)
    drafting = LLM(device="cpu", max_num_seqs=1, max_model_len=1024, speculate="ngram", num_speculative_tokens=drafted)
    rows = []
    for file in sorted(TEXTS.glob("*.txt")):
        rows.append({"text": file.stem, **interleaved(plain, drafting, file.read_text(), new_tokens, rounds)})
        print(json.dumps(rows[-1]), flush=True)
    context = 200
    batches = LLM(device="cpu", max_num_seqs=16, max_model_len=1024)
    predicted = priced(SpeculativeSteps(calibrated(batches)), 1, context, drafted)
    story = (TEXTS / "differs_1_story.txt").read_text()
    measured = measured_break_even(plain, drafting, story, new_tokens, rounds)
    kinds = {kind: [row["ratio"] for row in rows if row["text"].startswith(kind)] for kind in ("repeats", "differs")}
    return {
        "rows": rows,
        "ratio_repeats": median(kinds["repeats"]),
        "ratio_differs": median(kinds["differs"]),
        "ratio_differs_least": min(kinds["differs"]),
        "predicted": predicted,
        "measured": measured,
    }


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description="N-gram speculation on texts that repeat and on texts that do not.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--drafted", type=int, default=4, help="most tokens of a draft")
    parser.add_argument("--threads", type=int, help="torch's")
    parser.add_argument("--out", type=Path, help="folder for the record and for study.json")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    found = study(given.rounds, given.new_tokens, given.drafted)
    print(json.dumps(found, indent=1))
    if given.out:
        metrics = {name: value for name, value in found.items() if isinstance(value, float)}
        metrics |= {"predicted_break_even": found["predicted"]["break_even_acceptance"] or 1.0}
        metrics |= {"measured_break_even": found["measured"]["break_even"]}
        case = {"rounds": given.rounds, "new_tokens": given.new_tokens, "drafted": given.drafted}
        writer = RunWriter(given.out)
        common = Environment.now().record_fields()
        writer.write(Record(
            kind="engine", run_id=writer.run_id, status="OK", **common, case_id="speculation", case=case, device="cpu",
            basis="measured", timer="perf_counter", metrics=metrics,
        ))  # fmt: skip
        (given.out / "study.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
