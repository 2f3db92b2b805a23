"""What is measured of the engine: a step by its ops, its host work, and batches of mixed requests."""

import pytest
from engine_vs_transformers import LENGTHS, batch_of_engine, mixed_requests, time_ops
from tiny_model import prompts, tiny_llm, with_graphs


def test_a_step_by_its_ops_adds_up_and_leaves_the_engine_as_it_was(tmp_path):
    llm = with_graphs(tiny_llm(tmp_path))
    ops, graphs = llm.runner.ops, llm.runner.graphs
    table = time_ops(llm, prompts()[2], steps=6)
    assert (table["gemm"]["calls"], table["decode_attention"]["calls"], table["host"]["calls"]) == (9, 2, 1)
    assert sum(row["share"] for row in table.values()) == pytest.approx(1) and all(
        row["us"] > 0 for row in table.values()
    )
    assert llm.runner.ops is ops and llm.runner.graphs is graphs and not llm.has_work


def test_mixed_requests_are_the_same_each_time_and_all_are_answered(tmp_path):
    requests, llm = mixed_requests(5, 1024), tiny_llm(tmp_path)
    assert requests == mixed_requests(5, 1024) and len({(len(prompt), answer) for prompt, answer in requests}) == 5
    assert all(LENGTHS["prompt"][0] <= len(prompt) <= LENGTHS["prompt"][1] for prompt, _ in requests)
    drawn, run = [], llm.runner.run
    llm.runner.run = lambda step: drawn.append(run(step)) or drawn[-1]
    assert batch_of_engine(llm, requests).batch_ms > 0
    assert sum(len(draw.ids) for draw in drawn if draw) == sum(answer for _, answer in requests)
