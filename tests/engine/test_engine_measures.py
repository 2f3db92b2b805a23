"""Measurements of the engine: a step by its ops."""

import pytest
from cpu.make import time_ops
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
