"""Engines that speculate, and a drafter that knows the answers, for tests."""

import random

from tiny_model import check_pages, tiny_llm

from rooflab.engine.speculate.drafter import Drafter
from rooflab.engine.speculate.lengths import Lengths

LIBRARY = {"swap": {"gemm": "library"}}


class Always(Lengths):
    """Drafts as much as it may, whatever that costs."""

    idle = False

    def of(self, sequence):
        return self.most

    def verified(self, sequence, drafted, accepted):
        pass


class Known(Drafter):
    """Drafts the right tokens with some wrong ones among them, of random lengths; sometimes none."""

    def __init__(self, seed, vocab=1024):
        self.answers, self.right, self._random, self._vocab = {}, 0.8, random.Random(seed), vocab

    def wants(self, rows, lengths):
        draw = self._random
        return [(one, draw.randint(1, lengths.most)) for one in rows if draw.random() < 0.8]

    def draft(self, drafting):
        drafts = {}
        for one, most in drafting:
            made = self.answers.get(one.request_id, [])[len(one.output_ids) :][: self._random.randint(1, most)]
            wrong = [self._random.randrange(self._vocab) for _ in range(most)]
            drafts[one] = [token if self._random.random() < self.right else wrong[0] for token in made] or wrong[:1]
        return drafts


def speculating(folder, config=None, drafter=None, **options):
    """A tiny engine that always drafts as much as it may."""
    llm = tiny_llm(folder, config, **{**LIBRARY, "speculate": "ngram", **options})
    llm.core.speculator.lengths = Always(llm.speculation.num_tokens)
    if drafter is not None:
        llm.runner.drafter = drafter
    return llm


def watched(llm):
    """The drafted and accepted tokens of each step that drafts, as they come."""
    seen, step = [], llm.core.step

    def stepping():
        got = step()
        if (found := llm.core.speculator.last) is not None:
            seen.append((found.drafted, sum(found.accepted)))
        return got

    llm.core.step = stepping
    return seen


def exact(llm):
    """Raises `AssertionError` unless every decoding sequence holds the pages of its computed tokens and no more, and
    the published pages hold accepted tokens alone."""
    scheduler = llm.scheduler
    blocks = scheduler.blocks
    check_pages(blocks, scheduler.running)
    for one in scheduler.running:
        if one.row >= 0:
            assert len(one.block_ids) == blocks.blocks_for(len(one) - 1), "a draft's page is held"
            assert len(one.contents) * blocks.block_size <= len(one) - 1
            assert len(llm.runner.batch.rows) > one.row and llm.runner.batch.positions[one.row] == len(one) - 1


def prefixes(llm):
    """The tokens of each page that is published from now on, with all before it."""
    blocks, found = llm.scheduler.blocks, set()
    publish = blocks.publish

    def publishing(sequence, num_computed):
        publish(sequence, num_computed)
        found.add(tuple(sequence.token_ids[: len(sequence.contents) * blocks.block_size]))

    blocks.publish = publishing
    return found


def only_accepted(published, texts):
    """Raises `AssertionError` unless each published prefix begins one of the texts, prompts with their answers."""
    for prefix in published:
        assert any(tuple(text[: len(prefix)]) == prefix for text in texts), "a rejected token can be found"
