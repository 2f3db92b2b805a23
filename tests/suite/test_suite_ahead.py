"""The kernels that later entries launch are compiled ahead."""

from __future__ import annotations

from typing import Any

import pytest

from rooflab.bench.suite import ahead
from rooflab.bench.suite.plan import make_plan
from rooflab.kernels import registry


def test_every_entry_that_checks_or_times_an_op_says_what_it_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Compilers:
        def ask_all(self, requests: list[dict[str, Any]]) -> list[Any]:
            asked.extend(requests)
            return [{"kernels": 1, "seconds": 0.0} for _ in requests]

        def stop(self) -> None: ...

    monkeypatch.setattr(ahead, "compilers", Compilers)
    assert ahead.compile_entries([]) == [], "a run with nothing left"
    rows = ahead.compile_entries(make_plan())
    about = {f"{what}:{op}" for what in ("check", "bench") for op in registry.ops()}
    assert {row["entry"] for row in rows} == {request["entry"] for request in asked} == {"ceilings", *about}
    for (launches,) in (request["launches"] for request in asked[1:]):
        every, spec = ahead.launched(launches), registry.get_op(launches["op"])
        own = {kernel.name for kernel in registry.kernels(spec.name).values() if ahead.has_code(kernel)}
        assert {kernel.name for kernel, _, _ in every} == own
        assert not own or len({s.name for *_, s in every}) == (len(spec.schemes) if launches.get("scheme") else 1)
