"""Tests whose needs the machine lacks: they are skipped with one sentence, counted by reason, and never lost."""

import needs
import pytest

pytest_plugins = "pytester"
TESTS = """
import pytest

@pytest.mark.needs("nothing like it")
def test_a(): pass

@pytest.mark.gpu
def test_b(): pass

def test_c(): pass

@pytest.mark.parametrize("case", range(9))
@pytest.mark.sampled(2)
def test_d(case): pass
"""


@pytest.mark.parametrize("strict", [False, True])
def test_a_skip_has_its_reason_and_fails_where_everything_is_there(pytester, monkeypatch, request, strict):
    monkeypatch.setitem(needs.NEEDS, "nothing like it", (lambda: None, "a thing"))
    monkeypatch.setenv("ROOFLAB_NO_SKIPS", "1" if strict else "")
    pytester.makepyfile(TESTS)
    (conftest,) = (p for p in request.config.pluginmanager.get_plugins() if getattr(p, "SEED", None) is not None)
    own = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-m", "not more", plugins=[conftest])
    own.assert_outcomes(passed=3, errors=int(strict), skipped=2 - strict, deselected=7)
    lines = own.stdout.str()
    assert "skipped 1: needs a CUDA device and ROOFLAB_TEST_ON_GPU=1" in lines
    assert ("skipped 1: needs a thing" in lines) is not strict
    assert ("does not have the reason: needs a thing" in lines) is strict
