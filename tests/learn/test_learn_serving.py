"""Sections 11 to 20 of `rooflab learn` in a browser: their numbers are the product's, and each touch changes them."""

import json
import random
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_scheduler import end, make

from rooflab.bench.latency.clock import ClockSettings, simulate
from rooflab.bench.latency.step_model import KernelTimes
from rooflab.bench.learn.learn_data import load
from rooflab.bench.learn.learn_page import render
from rooflab.bench.load.metrics import summarize
from rooflab.engine.block_manager import BlockManager
from rooflab.engine.speculate.rows import accepted
from rooflab.roofline.architecture import PRESETS
from rooflab.roofline.device import DEVICES
from rooflab.roofline.llm import estimate, kv_bytes_per_token, weight_bytes
from rooflab.roofline.steps import gpu_counts

pytestmark = [pytest.mark.more, pytest.mark.needs("browser")]
SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "results/learn/serving.py"))
DATA, H100 = load(), DEVICES["h100-sxm"]
WITH_DATA = (
    "async x => { const {models} = await rooflab.data('models'), {gpus} = await rooflab.data('gpus'); return %s }"
)
PAGES = """calls => {
  const [pages, all] = [new rooflab.Pages(12, 4), {}];
  return calls.map(([name, id, tokens, count]) => {
    const one = Object.assign((all[id] ??= {pages: [], contents: []}), {tokens});
    pages[name](one, count);
    return [pages.numFree, pages.cached.size, pages.evicted, ...one.pages];
  });
}"""


@pytest.fixture(scope="module")
def page(chromium):
    """The page as `rooflab serve` gives it; the test plays the server."""

    def reply(route):
        name = route.request.url.rpartition("/")[2]
        route.fulfill(body=bodies[name], content_type="text/html" if name == "learn" else "text/plain")

    words, errors = [{"role": "assistant"}, {"content": "Par"}, {"content": "is"}], []
    events = "".join(f"data: {json.dumps({'choices': [{'delta': word}]})}\n\n" for word in words)
    bodies = {"learn": render(live=True), "models": '{"data": [{"id": "tiny"}]}', "completions": events}
    found = chromium.new_page()
    found.on("pageerror", lambda error: errors.append(error))
    found.route("**/*", reply)
    found.goto("http://lab.test/learn")
    found.evaluate("Promise.all([...document.querySelectorAll('[data-widget]')].map(rooflab.open))")
    yield found
    assert not errors


def touch(page, name, button="", select=0, value=None):
    """Presses a button or chooses a value, and returns the widget's sentence."""
    widget = page.locator(f"[data-widget={name}]")
    if button:
        widget.get_by_role("button", name=button).click()
    if value is not None:
        widget.locator("select").nth(select).select_option(value)
    return widget.locator(":scope > output").first.inner_text()


def cells(page, name):
    rows = page.locator(f"[data-widget={name}] tbody tr")
    return rows.evaluate_all("all => all.map(row => [...row.cells].map(cell => cell.innerText))")


def test_the_estimate_is_that_of_the_product(page):
    drawn, asked, wanted = random.Random(1), [], []
    for _ in range(20):
        arch, gpu = drawn.choice([*PRESETS.values()]), drawn.choice([*DEVICES.values()])
        size = {"batch": 2 ** drawn.randrange(11), "context": 2 ** drawn.randrange(14)}
        pair = drawn.choice([("bf16", "bf16"), ("int8", "bf16"), ("fp32", "int8")])
        gpus = drawn.choice(gpu_counts(arch))
        own = estimate(arch, gpu, *size.values(), *pair, tensor_parallel=gpus)
        asked.append([arch.name, gpu.name, {**size, "gpus": gpus, "dtype": pair[0], "kv_dtype": pair[1]}])
        each = own.weight_bytes_per_gpu, own.kv_bytes_per_gpu, own.activation_bytes_per_gpu
        wanted.append([*each, own.max_sequences, own.fits, kv_bytes_per_token(arch, pair[1], gpus)])
    names = ["weight_bytes", "kv_bytes", "activation_bytes", "max_sequences", "fits", "kv_bytes_per_token"]
    call = f"x.map(([m, g, o]) => {names}.map(name => rooflab.estimate(models[m], gpus[g], o)[name]))"
    assert page.evaluate(WITH_DATA % call, asked) == wanted


def test_keys_and_choices_change_what_fits(page):
    arch, before = PRESETS["llama-3.1-8b"], touch(page, "estimator")
    assert before.startswith("It fits") and before.endswith(f" {estimate(arch, H100, 16, 4096).max_sequences}.")
    page.get_by_label("context, tokens").press("ArrowLeft")
    assert touch(page, "estimator").endswith(f" {estimate(arch, H100, 16, 2048).max_sequences}.")
    assert touch(page, "estimator", value="llama-3.1-70b").startswith("It does not fit")


def test_pages_are_those_of_the_block_manager(page):
    drawn, calls, wanted, running, blocks = random.Random(2), [], [], [], BlockManager(12, 4)

    def call(name, one, *count):
        getattr(blocks, name)(one, *count)
        calls.append([name, one.request_id, list(one.token_ids), *count])
        wanted.append([blocks.num_free, blocks.num_cached, blocks.evicted, *one.block_ids])

    while len(calls) < 200:
        one = drawn.choice([make(len(calls), drawn.choices([1, 2], k=drawn.randrange(1, 14)), 1000), *running])
        if one in running:
            one.token_ids.append(drawn.randrange(3))
        else:
            call("reuse", one)
            running.append(one)
        call("grow", one, len(one))
        if len(one.block_ids) == blocks.blocks_for(len(one)) and drawn.random() < 0.8:
            call("publish", one, len(one) - 1)
        else:
            call("release", one)
            running.remove(one)
    assert page.evaluate(PAGES, calls) == wanted and blocks.evicted > 0


def test_two_sequences_share_pages_and_the_last_is_preempted(page):
    for text in ("start: 8", "start: 8"):
        touch(page, "pages", text)
    assert [row[2:] for row in cells(page, "pages")] == [["0, 1, 2", "0"], ["0, 1, 3", "8"]]
    touch(page, "pages", "start: a new")
    texts = [touch(page, "pages", "one token") for _ in range(3)]
    assert texts[2].startswith("C came last") and len(cells(page, "pages")) == 2
    assert touch(page, "pages", "end the first").startswith("A has ended")


def test_a_rank_holds_and_sends_what_the_product_computes(page):
    arch = PRESETS["llama-3.1-70b"]
    for gpus in gpu_counts(arch):
        asked = [{"tensor": gpus, "stages": stages, "rows": 64} for stages in (1, 3)]
        call = f"x.map(o => rooflab.ranks(models['{arch.name}'], gpus['h100-sxm'], o))"
        (one,), three = page.evaluate(WITH_DATA % call, asked)
        assert [one["weights"], one["kv"]] == [weight_bytes(arch, "bf16", gpus), kv_bytes_per_token(arch, "bf16", gpus)]
        wanted_ms = estimate(arch, H100, 64, 64, tensor_parallel=gpus).decode.all_reduce_ms
        assert one["reduced_ms"] == pytest.approx(wanted_ms)
        assert sum(rank["weights"] for rank in three) == pytest.approx(one["weights"], abs=3)
    assert touch(page, "ranks", select=2, value="8").startswith("GPUs: 32.") and len(cells(page, "ranks")) == 8


def test_the_second_prompt_saves_what_the_block_manager_reuses(page):
    for index, second in enumerate(DATA["prefix"]["seconds"]):
        blocks, one, two = BlockManager(64, 16), make(0, DATA["prefix"]["first"]["ids"], 1), make(1, second["ids"], 1)
        blocks.grow(one, len(one))
        blocks.publish(one, len(one))
        blocks.reuse(two)
        assert touch(page, "prefix", value=str(index)).endswith(f"again: {two.num_computed} of {len(two)} tokens.")
    page.get_by_label("or: tokens that it shares").press("Home")
    assert touch(page, "prefix").startswith("Shared pages: 0.")


@pytest.mark.parametrize("mode", ["continuous", "static"])
def test_the_trace_is_a_run_of_the_scheduler(page, mode):
    scheduler = SCRIPT["scheduler_of"](mode == "continuous")
    core = SimpleNamespace(scheduler=scheduler, last=None)

    def submit(index):
        prompt, output, _ = SCRIPT["REQUESTS"][index]
        scheduler.submit(one := make(index, prompt, output, float(index)))
        return one

    def step():
        core.last = scheduler.schedule()
        end(scheduler, core.last)

    fresh = SCRIPT["replay"](core, step, submit, [arrival for _, _, arrival in SCRIPT["REQUESTS"]])
    steps = DATA["batching"]["steps"][mode]
    assert [(one["cells"], one["free"]) for one in steps] == [(one["cells"], one["free"]) for one in fresh]
    assert touch(page, "trace", value=mode).startswith(f"{len(steps)} of {len(steps)} steps")
    assert sum(row.count("preempted") for row in cells(page, "trace")) == (mode == "continuous")
    assert [touch(page, "trace", text)[:2] for text in ("from the start", "next step")] == ["0 ", "1 "]


def test_drafts_are_accepted_by_the_rule_of_the_engine(page):
    for index, run in enumerate(DATA["drafts"]["runs"]):
        pairs, own = [(step["drew"], step["draft"]) for step in run["steps"]], object()
        wanted = [accepted([own] * len(drew), drew, {own: draft})[own] for drew, draft in pairs]
        assert page.evaluate("pairs => pairs.map(pair => rooflab.accepted(...pair))", pairs) == wanted
        assert [token for new in wanted for token in new][: len(run["answer"])] == run["answer"]
        text = f"{len(run['answer']) - 1} tokens in {len(pairs) - 1} decode steps"
        assert touch(page, "drafts", value=str(index)).startswith(text)


def test_a_curve_is_a_simulation(page):
    one, kernels = DATA["curves"]["settings"][1], KernelTimes(PRESETS["llama-3.1-8b"], H100)
    own = ClockSettings(2**20, 16, one["max_num_seqs"], 8192, one["prefill_chunk"], one["prefix_caching"])
    plan = SCRIPT["plan_of"](DATA["curves"]["rates"][5])
    found = summarize(simulate(kernels, plan, own.fitting(kernels)), DATA["curves"]["limits"])
    assert all(one[name][5] == pytest.approx(found[name], rel=1e-3) for name in SCRIPT["CURVES"])
    before = cells(page, "curves")
    page.locator("[data-widget=curves] select").nth(2).select_option("goodput_requests_per_s")
    assert [row[0] for row in before] == [row[0] for row in cells(page, "curves")] and before != cells(page, "curves")


def test_the_ledger_adds_up_and_the_server_is_asked(page):
    for kind in ("prefill", "decode"):
        touch(page, "answer", "next step")
        total = sum(row[5] for row in DATA["run"]["ledger"][kind]["rows"])
        assert cells(page, "answer")[-1][3] == page.evaluate("rooflab.digits", total), kind
    touch(page, "answer", "ask this server")
    page.get_by_text("as this page got the tokens").wait_for()
    assert page.locator("[data-widget=answer] p").inner_text() == "Paris"


def test_the_longest_gap_follows_the_size_of_a_chunk(page):
    for index, run in enumerate(DATA["chunks"]["runs"]):
        longest = max(step["ms"] for step in run["steps"][1:] if step["cells"][0] == "d")
        text = touch(page, "chunks", value=str(index))
        assert text.startswith(f"Longest gap of the others: {page.evaluate('rooflab.ms', longest)}. TTFT")
