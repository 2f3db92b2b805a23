"""The predictor, compared with published times of public kernels."""

import pandas as pd
import pytest

from rooflab.bench.predict import public
from rooflab.roofline.model import Cost


def reading(factor):
    """A published time that is `factor` of the prediction's part beyond its launches."""
    return {"published_us": factor * 10.0, "predicted_us": 12.6}


def test_the_error_is_that_of_the_whole_prediction():
    assert public.unfitted(pd.DataFrame([reading(0.5)] * 2)).median == pytest.approx(12.6 / 5 - 1)
    assert public.unfitted(pd.DataFrame([reading(1.26)])).median == pytest.approx(0.0)


def test_the_readings_are_of_all_kinds():
    assert set(public.read()["kind"]) == {"memory", "attention", "product"}


def test_a_prediction_says_the_error_on_public_kernels_of_its_kind():
    product = Cost(1e8, 0, {"bf16": 1e9})
    assert public.kind_of("paged_attention", product) == "attention" and public.kind_of("gemm", product) == "product"
    assert public.kind_of("merge_attention_states", Cost(1e8, 0)) == "memory"
    readings = public.read()
    of_kind = public.unfitted(readings[readings["kind"] == "memory"])
    assert public.error_text("rmsnorm", Cost(1e8, 0)) == (
        f"uncalibrated; public kernels of its kind (memory) err by {of_kind}"
    )
