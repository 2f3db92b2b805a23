"""Implements the pytest plugin: the option `--benchmark` and the fixtures `kernel_benchmark` and `emulated`.

pytest loads this plugin in every project, so it imports only pytest until a benchmark runs.  Tests with
`kernel_benchmark` are skipped without `--benchmark` or pytest-benchmark's `--benchmark-only`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from rooflab.bench.base.system_time import time

if TYPE_CHECKING:
    from rooflab.bench.emulator import Emulation
    from rooflab.roofline.model import Cost

FIXTURE_NAME = "kernel_benchmark"
EMULATED_FIXTURE_NAME = "emulated"
SKIP_REASON = "a kernel benchmark: runs with --benchmark"
MACHINE_KEY = "rooflab"
"""This plugin adds its values under this key in the `machine_info` of pytest-benchmark's JSON."""
NO_DRIVER_MESSAGE = (
    "fn: Triton finds no GPU here, and a time needs one; `rooflab check --kernel FILE` checks a registered kernel in "
    "the emulator, and the fixture `emulated` runs any there"
)
INTERPRETED_REASON = "ran in Triton's interpreter: its result is right, its time is not the kernel's"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option `--benchmark` to pytest."""
    parser.getgroup("rooflab").addoption(
        "--benchmark",
        action="store_true",
        default=False,
        dest="rooflab_benchmark",
        help=f"Run benchmarks and nothing else: tests that use the fixture {FIXTURE_NAME} or pytest-benchmark's.",
    )


@pytest.hookimpl(tryfirst=True)  # pytest-codspeed blocks pytest-benchmark in this hook
def pytest_configure(config: pytest.Config) -> None:
    """Refuses `--benchmark` without pytest-benchmark, or with `--codspeed`, which replaces pytest-benchmark."""
    if config.getoption("rooflab_benchmark") and not hasattr(config.option, "benchmark_disable"):
        raise pytest.UsageError("--benchmark: needs the plugin pytest-benchmark, which is not loaded")
    codspeed_option = config.getoption("codspeed", None)  # None: pytest-codspeed is not loaded
    if asked(config) and (codspeed_option or (codspeed_option is not None and "CODSPEED_ENV" in os.environ)):
        raise pytest.UsageError(
            "--benchmark: expected no --codspeed or CODSPEED_ENV beside it: run one after the other"
        )


def asked(config: pytest.Config) -> bool:
    """Returns whether the user asked for benchmarks: with `--benchmark`, or with `--benchmark-only`."""
    return bool(config.getoption("rooflab_benchmark") or config.getoption("benchmark_only", False))


@pytest.hookimpl(trylast=True)  # pytest reports what -k and -m deselect; this hook runs after them
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--benchmark`, deselects tests without a benchmark.  Else skips the benchmarks of this plugin."""
    if not config.getoption("rooflab_benchmark"):  # --benchmark-only itself skips the others
        for test_item in () if asked(config) else items:
            if FIXTURE_NAME in _fixtures(test_item):
                test_item.add_marker(pytest.mark.skip(reason=SKIP_REASON))
        return
    other_tests = [test_item for test_item in items if not {FIXTURE_NAME, "benchmark"} & set(_fixtures(test_item))]
    if other_tests:
        config.hook.pytest_deselected(items=other_tests)
        items[:] = [test_item for test_item in items if test_item not in set(other_tests)]


def _fixtures(item: pytest.Item) -> Sequence[str]:
    return getattr(item, "fixturenames", ())


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Adds the versions of torch and Triton, and the GPU, to pytest-benchmark's description of the machine."""
    if asked(config):
        from rooflab.bench.core import Environment

        env = Environment.now().to_dict()
        machine_info[MACHINE_KEY] = {name: env[name] for name in ("machine_key", "torch", "triton", "threads", "gpu")}


class Replay:
    """Replaces pytest-benchmark's timer.  It returns durations that this plugin measured, one for each round.

    pytest-benchmark reads its timer at the start and at the end of each round.  Before `load` is called, the timer
    returns `perf_counter()`.  So a test that also uses the fixture `benchmark` directly gets real times."""

    __name__ = "rooflab_samples"

    def __init__(self) -> None:
        self._ends: list[float] = []
        self._inside = False

    def load(self, durations: Sequence[float]) -> None:
        """Stores `durations` (in seconds), which the next calls of the timer replay."""
        self._ends = list(reversed(durations))

    def __call__(self) -> float:
        """Returns 0 at a round's start and the stored seconds at its end, or the real clock if no time is stored."""
        if not self._ends:
            return time.perf_counter()
        self._inside = not self._inside
        return 0.0 if self._inside else self._ends.pop()


_TIMER_KEY = pytest.StashKey[Replay]()
_NOISE_LINES_KEY = pytest.StashKey[list[str]]()
MIN_SLOWDOWN_S, PROCESSES = 5e-6, 2.0
"""The least change in seconds, and the least ratio, at which a CPU reading differs from a stored baseline.

Two processes that run equal code differ by less: by 2 of 6 us, by a ratio of 1.19 among 36 readings on two shared
cores, and by a ratio of 1.4 if another process uses the other core.  `rooflab ab` compares pairs of processes and finds
smaller changes.
"""


class QuietCheck:
    """Wraps a check of `--benchmark-compare-fail`, and ignores a failure if the measured time or its baseline is NOISY.
    On a CPU, it also ignores small slowdowns, because two processes differ even with equal code."""

    def __init__(self, check: Any, noisy: set[tuple[str, str]], lines: list[str]) -> None:
        self.check, self.noisy, self.lines, self.compared = check, noisy, lines, 0

    def fails(self, current: Any, compared: Any) -> str | None:
        """Returns the result of pytest-benchmark's own check, or None (no failure) if the difference is noise."""
        if (compared["path"], current.fullname) in self.noisy:
            return None
        self.compared += 1
        check_result: str | None = self.check.fails(current, compared)
        current_s, baseline_s = current[self.check.field], compared[self.check.field]
        on_cpu = current.extra_info.get("device_type") == "cpu"
        if check_result and on_cpu and (current_s - baseline_s < MIN_SLOWDOWN_S or current_s < PROCESSES * baseline_s):
            slowdown_text = f"{1e6 * (current_s - baseline_s):.2g} us ({current_s / baseline_s - 1:.0%})"
            self.lines.append(f"{current.fullname}: {slowdown_text} slower, as two processes differ by themselves")
            return None
        return check_result


def _noise(info: Mapping[str, Any]) -> str:
    """Explains why a measured time is too noisy for a comparison. Returns "" if it is not."""
    status = str(info.get("status"))
    return status if status.startswith("NOISY: ") else ""


@pytest.hookimpl(wrapper=True, tryfirst=True)  # pytest-benchmark compares in this hook, before it yields
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    """Removes noisy times from pytest-benchmark's check `--benchmark-compare-fail`.  A time is NOISY if the machine was
    busy during its measurement.  The exit status is 13 if noise leaves no time to compare."""
    bench_session = getattr(session.config, "_benchmarksession", None)
    lines, noisy_tests = session.config.stash.setdefault(_NOISE_LINES_KEY, []), set()
    if bench_session is None or not bench_session.compare_fail:
        return (yield)
    for benchmark, (baseline_path, baseline_data) in itertools.product(
        filter(None, bench_session.benchmarks), bench_session.compared_mapping.items()
    ):
        if benchmark.fullname not in baseline_data:
            continue
        baseline_info = baseline_data[benchmark.fullname].get("extra_info", {})
        if baseline_noise := _noise(baseline_info):
            lines.append(f"{benchmark.fullname}: its baseline {baseline_path.name} is {baseline_noise}")
        if baseline_noise or _noise(benchmark.extra_info):
            noisy_tests.add((str(baseline_path), benchmark.fullname))
    bench_session.compare_fail = compare_checks = [
        QuietCheck(check, noisy_tests, lines) for check in bench_session.compare_fail
    ]
    if noisy_tests:
        lines.append(f"NOISY readings are left out of --benchmark-compare-fail: {len(noisy_tests)}")
    wrapped_result = yield
    if noisy_tests and not any(check.compared for check in compare_checks) and session.exitstatus == pytest.ExitCode.OK:
        from rooflab.bench.base.statuses import ExitStatus

        session.exitstatus = ExitStatus.INVALID
    return wrapped_result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Makes the test's `benchmark` marker use this plugin's timer.  The other options of the marker stay the same."""
    if FIXTURE_NAME in _fixtures(item) and asked(item.config):
        item.stash[_TIMER_KEY] = Replay()
        item.add_marker(pytest.mark.benchmark(**_options(item), timer=item.stash[_TIMER_KEY]), append=False)


@pytest.hookimpl(tryfirst=True)  # before pytest-benchmark's hook, which ends the run where something has regressed
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Prints which measurements are NOISY, and how many benchmarks did not run.  pytest-benchmark prints neither."""
    lines = config.stash.get(_NOISE_LINES_KEY, [])
    num_skipped = sum(SKIP_REASON in str(report.longrepr) for report in terminalreporter.stats.get("skipped", ()))
    option_names = ("json", "save", "autosave", "compare", "histogram")
    if num_skipped and any(config.getoption(f"benchmark_{name}", None) for name in option_names):
        lines = [f"{num_skipped} kernel benchmark{'s were' if num_skipped > 1 else ' was'} not run: add --benchmark"]
    for line in lines:
        terminalreporter.write_line(f"rooflab: {line}", yellow=True)


def _options(item: pytest.Item) -> dict[str, Any]:
    marker = item.get_closest_marker("benchmark")
    return {name: option_value for name, option_value in marker.kwargs.items() if name != "timer"} if marker else {}


def _limits(item: pytest.Item) -> dict[str, Any]:
    """Returns the time budget of a benchmark in seconds, and its least number of samples.  The options of the test's
    `benchmark` marker override the options of the command line."""
    marker_options, config = _options(item), item.config
    return {
        "budget_s": float(marker_options.get("max_time", config.getoption("benchmark_max_time"))),
        "min_samples": int(marker_options.get("min_rounds", config.getoption("benchmark_min_rounds"))),
    }


@pytest.fixture
def kernel_benchmark(request: pytest.FixtureRequest, benchmark: Any) -> Callable[..., Any]:
    """`kernel_benchmark(fn, *args, reference=None, cost=None)`: checks `fn(*args)`, times it, and returns its result.

    With `reference`, `fn(*args)` must equal `reference(*args)` within a few roundings of the output dtype, before and
    after timing.  A wrong result fails the test, and no time is reported.  `fn` may change its arguments.  Other
    keyword arguments go to `fn` and to `reference`.  A test may call `kernel_benchmark` once.

    `rooflab.bench.core.timers.timing` measures device time with a cold cache, after a warm-up.  The result is an
    ordinary pytest-benchmark result, with raw samples in `extra_info`.  `cost`, a `rooflab.roofline.model.Cost`, adds
    FLOP/s, bytes/s and the fraction of the roofline.

    The keyword argument `afterwards` is a further check after timing: a function that returns None or an error text.
    `fn` may be a `Checked`: a call that was checked before, such as a kernel of Rooflab's on a case.

    `max_time` and `min_rounds` of `pytest.mark.benchmark` limit the timing.  Otherwise `--benchmark-max-time` and
    `--benchmark-min-rounds` do.  If pytest-benchmark is disabled (xdist, `--benchmark-disable`), `fn` is only checked.

    A measurement is NOISY if the machine was busy.  The test then passes, and `--benchmark-compare-fail` ignores the
    measurement.
    """
    config, test_item = request.config, request.node

    def run(
        fn: Any,
        *args: Any,
        reference: Callable[..., Any] | None = None,
        cost: Cost | None = None,
        afterwards: Callable[[], str | None] | None = None,
        **named: Any,
    ) -> Any:
        from rooflab.bench.base.plain import plain
        from rooflab.bench.core import Checked
        from rooflab.bench.plugin import fixture_time as plugin_timing
        from rooflab.roofline.model import Cost

        if benchmark._mode:
            benchmark.has_error = True  # the first result is not saved either: nothing would say what it measures
            pytest.fail(
                "kernel_benchmark: expected one timing in a test, got a second: parametrize the test", pytrace=False
            )
        if not isinstance(cost, Cost | None):
            _fail(benchmark, f"cost: expected a rooflab.roofline.model.Cost, got {cost!r}")
        if named:  # by position, so that their tensors are copied and protected as the others are
            fn, args = _by_position(fn, tuple(named)), (*args, *named.values())
            reference = reference and _by_position(reference, tuple(named))
        checked_call = fn if isinstance(fn, Checked) else _by_fn(benchmark, Checked.of, fn, args, reference)
        if checked_call.fault:
            _fail(benchmark, checked_call.fault)
        if benchmark.disabled:
            return benchmark.pedantic(lambda: checked_call.result)
        if checked_call.interpreted:
            pytest.skip(INTERPRETED_REASON)
        record = _by_fn(benchmark, plugin_timing.time_kernel, checked_call, cost, **_limits(test_item))
        info = plugin_timing.extra_info(record, cost)
        if afterwards and record.status in ("OK", "NOISY") and (post_run_error := afterwards()):
            info["status"] = f"INCORRECT: after timing: {post_run_error}"
        is_noisy = info["status"].startswith("NOISY: ")
        if info["status"] != "OK" and not is_noisy:
            _fail(benchmark, info["status"])
        if is_noisy:
            config.stash.setdefault(_NOISE_LINES_KEY, []).append(f"{test_item.nodeid}: {info['status']}")
        is_checked = checked_call.judged or reference is not None or afterwards is not None
        benchmark.extra_info.update(plain(info) | {"checked": is_checked})
        samples_s = record.samples_s
        test_item.stash[_TIMER_KEY].load(samples_s)
        return benchmark.pedantic(lambda: checked_call.result, rounds=len(samples_s))

    return run


@pytest.fixture
def emulated() -> Iterator[Emulation]:
    """Runs all Triton kernels of a test in an emulated H100, with CPU tensors.  The fixture's value lists the launches.

    The test fails on an access out of bounds, a read of unwritten memory, an endless kernel, or a race.  Triton's
    interpreter (`TRITON_INTERPRET`) must be off."""
    from rooflab.bench.emulate import emulating

    with emulating() as kernel_emulation:
        yield kernel_emulation


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Fails a test with the fixture `emulated` if a kernel has a race.  Tracebacks end in the user's code."""
    if EMULATED_FIXTURE_NAME not in pyfuncitem.funcargs:
        return (yield)
    from rooflab.bench.emulator import Emulation, EmulationError, users_part

    kernel_emulation = pyfuncitem.funcargs[EMULATED_FIXTURE_NAME]
    if not isinstance(kernel_emulation, Emulation):  # a fixture of the project itself
        return (yield)
    try:
        wrapped_result = yield
    except EmulationError as error:
        raise error.with_traceback(users_part(error.__traceback__)) from None
    if kernel_emulation.races:
        pytest.fail("; ".join(map(str, kernel_emulation.findings)), pytrace=False)
    return wrapped_result


def _by_fn(benchmark: Any, action: Callable[..., Any], *values: Any, **named: Any) -> Any:
    """Calls `action`, which runs the user's `fn`. Fails the test if `fn` calls `pytest.skip` or `pytest.xfail`."""
    try:
        return action(*values, **named)
    except (pytest.skip.Exception, pytest.xfail.Exception) as left:
        _fail(benchmark, f"fn: expected a result, got {type(left).__name__}: {left}")
    except RuntimeError as error:
        if not str(error).startswith("0 active drivers"):  # Triton's words
            raise
        _fail(benchmark, NO_DRIVER_MESSAGE)


def _by_position(fn: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Wraps `fn` for callers that pass all arguments by position.  The wrapper passes the last arguments on to `fn` by
    keyword.  `names` are their keywords, in order."""

    @functools.wraps(fn)
    def call(*values: Any) -> Any:
        num_positional_args = len(values) - len(names)
        return fn(*values[:num_positional_args], **dict(zip(names, values[num_positional_args:], strict=True)))

    return call


def _fail(benchmark: Any, fault: str) -> NoReturn:
    """Fails the test with the message `fault`. An error inside `benchmark.pedantic`, caught here, keeps it from saving
    a result."""

    def wrong() -> NoReturn:
        raise AssertionError(fault)

    with contextlib.suppress(AssertionError):
        benchmark.pedantic(wrong)
    pytest.fail(fault, pytrace=False)
