"""Sections 11 to 20 of `rooflab learn` in a browser: their numbers are the product's, and each touch changes them."""

import json
import random
import runpy
from pathlib import Path
from types import SimpleNamespace

import needs
import pytest

from rooflab.bench.latency.clock import ClockSettings, _Runner, simulate
from rooflab.bench.latency.step_model import KernelTimes
from rooflab.bench.learn.learn_data import load
from rooflab.bench.learn.learn_page import render
from rooflab.bench.load.metrics import summarize
from rooflab.engine.block_manager import BlockManager
from rooflab.engine.core import Core
from rooflab.engine.sequence import SamplingParams, Sequence
from rooflab.engine.speculate.rows import accepted
from rooflab.roofline.architecture import PRESETS
from rooflab.roofline.device import DEVICES, get_device
from rooflab.roofline.llm import estimate, kv_bytes_per_token, weight_bytes
from rooflab.roofline.steps import gpu_counts

pytestmark = [pytest.mark.more, pytest.mark.needs("browser")]
SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "results/learn/serving.py"))
DATA = load()
OPEN = "Promise.all([...document.querySelectorAll('[data-widget]')].map(rooflab.open))"
WITH_DATA = (
    "async (x) => { const [{models}, {gpus}] = await Promise.all(['models', 'gpus'].map(rooflab.data)); return %s }"
)
PAGES = """operations => {
  const pages = new rooflab.Pages(12, 4), running = [];
  return operations.map(([what, x]) => {
    const one = what === "start" ? {tokens: x, pages: [], contents: []} : running[x % (running.length || 1)];
    if (what === "start") { pages.reuse(one); running.push(one); }
    else if (!one) return [];
    else if (what === "token") one.tokens.push(x);
    if (what !== "end" && pages.grow(one, one.tokens.length)) pages.publish(one, one.tokens.length - 1);
    else pages.release(running.splice(running.indexOf(one), 1)[0]);
    return [pages.numFree, pages.cached.size, pages.evicted, ...running.map((other) => [...other.pages])];
  });
}"""


@pytest.fixture(scope="module")
def page():
    """The page as `rooflab serve` gives it; the test plays the server."""
    from playwright.sync_api import sync_playwright

    def reply(route):
        words = [{"role": "assistant"}, {"content": "Par"}, {"content": "is"}]
        events = "".join(f"data: {json.dumps({'choices': [{'delta': word}]})}\n\n" for word in words)
        name = route.request.url.rpartition("/")[2]
        bodies = {"learn": render(live=True), "models": '{"data": [{"id": "tiny"}]}', "completions": events}
        route.fulfill(body=bodies[name], content_type="text/html" if name == "learn" else "text/plain")

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=needs.browser(), args=["--no-sandbox"])
        found, errors = browser.new_page(), []
        found.on("pageerror", lambda error: errors.append(error))
        found.route("**/*", reply)
        found.goto("http://lab.test/learn")
        found.evaluate(OPEN)
        yield found
        assert not errors
        browser.close()


def widget(page, name):
    return page.locator(f"[data-widget={name}]")


def said(page, name):
    return widget(page, name).locator(":scope > output").last.inner_text()


def click(page, name, text):
    widget(page, name).get_by_role("button", name=text).click()
    return said(page, name)


def cells(page, name):
    return (
        widget(page, name)
        .locator("tbody tr")
        .evaluate_all("all => all.map(row => [...row.cells].map(c => c.innerText))")
    )


def sequence(ids, number=0, most=1000):
    return Sequence(number, list(ids), len(ids), SamplingParams(ignore_eos=True), 0, frozenset(), most, float(number))


def test_the_estimate_is_that_of_the_product(page):
    drawn, asked, wanted = random.Random(1), [], []
    for _ in range(20):
        arch, gpu = drawn.choice([*PRESETS.values()]), drawn.choice([*DEVICES.values()])
        size = {"batch": 2 ** drawn.randrange(11), "context": 2 ** drawn.randrange(14)}
        dtypes, gpus = (
            drawn.choice([("bf16", "bf16"), ("int8", "bf16"), ("fp32", "int8")]),
            drawn.choice(gpu_counts(arch)),
        )
        own = estimate(arch, gpu, *size.values(), *dtypes, tensor_parallel=gpus)
        asked.append([arch.name, gpu.name, {**size, "gpus": gpus, "dtype": dtypes[0], "kv_dtype": dtypes[1]}])
        names = "weight_bytes_per_gpu", "kv_bytes_per_gpu", "activation_bytes_per_gpu", "max_sequences", "fits"
        wanted.append([*(getattr(own, name) for name in names), kv_bytes_per_token(arch, dtypes[1], gpus)])
    names = ["weight_bytes", "kv_bytes", "activation_bytes", "max_sequences", "fits", "kv_bytes_per_token"]
    call = f"x.map(([m, g, o]) => {names}.map((name) => rooflab.estimate(models[m], gpus[g], o)[name]))"
    assert page.evaluate(WITH_DATA % call, asked) == wanted


def test_sliders_and_selects_of_the_estimator_change_what_fits(page):
    arch, gpu, before = PRESETS["llama-3.1-8b"], DEVICES["h100-sxm"], said(page, "estimator")
    assert before.endswith(f" {estimate(arch, gpu, 16, 4096).max_sequences}.")
    page.get_by_label("context, tokens").press("ArrowLeft")
    assert said(page, "estimator").endswith(f" {estimate(arch, gpu, 16, 2048).max_sequences}.") and before.startswith(
        "It fits"
    )
    widget(page, "estimator").get_by_label("model").select_option("llama-3.1-70b")
    assert said(page, "estimator").startswith("It does not fit")


def test_pages_are_those_of_the_block_manager(page):
    drawn, operations, wanted, running = random.Random(2), [], [], []
    for _ in range(200):
        start = [drawn.choice([1, 2]) for _ in range(drawn.randrange(1, 14))]
        what = drawn.choice(["start", "token", "token", "end"])
        operations.append((what, start if what == "start" else drawn.randrange(9)))
    blocks = BlockManager(12, 4)
    for what, x in operations:
        one = sequence(x) if what == "start" else running[x % len(running)] if running else None
        if one is None:
            wanted.append([])
            continue
        if what == "start":
            blocks.reuse(one)
            running.append(one)
        elif what == "token":
            one.token_ids.append(x)
        if what == "end" or not blocks.grow(one, len(one)):
            blocks.release(one)
            running.remove(one)
        else:
            blocks.publish(one, len(one) - 1)
        wanted.append([blocks.num_free, blocks.num_cached, blocks.evicted, *([*other.block_ids] for other in running)])
    assert page.evaluate(PAGES, operations) == wanted and wanted[-1][2] > 0


def test_two_sequences_share_pages_and_the_last_is_preempted(page):
    click(page, "pages", "start: 8 tokens"), click(page, "pages", "start: 8 tokens")
    assert [row[2:] for row in cells(page, "pages")] == [["0, 1, 2", "0"], ["0, 1, 3", "8"]]
    click(page, "pages", "start: a new text")
    texts = [click(page, "pages", "one token for each") for _ in range(4)]
    assert "C came last" in texts[2] and len(cells(page, "pages")) == 2
    assert "Cached pages given away so far: 0" in click(page, "pages", "end the first")


def test_a_rank_holds_and_sends_what_the_product_computes(page):
    arch, gpu = PRESETS["llama-3.1-70b"], get_device("h100")
    for gpus in gpu_counts(arch):
        asked = [{"tensor": gpus, "stages": stages, "rows": 64} for stages in (1, 3)]
        (one,), three = page.evaluate(
            WITH_DATA % f"x.map((o) => rooflab.ranks(models['{arch.name}'], gpus['h100-sxm'], o))", asked
        )
        assert [one["weights"], one["kv"]] == [weight_bytes(arch, "bf16", gpus), kv_bytes_per_token(arch, "bf16", gpus)]
        assert one["reduced_ms"] == pytest.approx(
            estimate(arch, gpu, 64, 64, tensor_parallel=gpus).decode.all_reduce_ms
        )
        assert sum(rank["layers"] for rank in three) == arch.num_layers and three[2]["sent"] == 0 < three[0]["sent"]
        assert sum(rank["weights"] for rank in three) == pytest.approx(one["weights"], abs=3)
    widget(page, "ranks").get_by_label("stages", exact=True).select_option("8")
    assert len(cells(page, "ranks")) == 8 and said(page, "ranks").startswith("GPUs: 32.")


def test_the_second_prompt_saves_what_the_block_manager_reuses(page):
    first, select = DATA["prefix"]["first"]["ids"], widget(page, "prefix").get_by_label("second prompt")
    for index, second in enumerate(DATA["prefix"]["seconds"]):
        blocks, one, two = BlockManager(64, 16), sequence(first), sequence(second["ids"])
        blocks.grow(one, len(one))
        blocks.publish(one, len(one))
        blocks.reuse(two)
        select.select_option(str(index))
        assert said(page, "prefix").endswith(f"again: {two.num_computed} of {len(two)} tokens.")
    page.get_by_label("or: tokens that it shares").press("Home")
    assert said(page, "prefix").startswith("Shared pages: 0.")


@pytest.mark.parametrize("mode", ["continuous", "static"])
def test_the_trace_is_a_run_of_the_scheduler(page, mode):
    scheduler = SCRIPT["scheduler_of"](mode == "continuous")
    core = Core(scheduler, _Runner(SimpleNamespace(seconds=lambda work: 0.0)))

    def submit(index):
        prompt, output, _ = SCRIPT["REQUESTS"][index]
        scheduler.submit(one := sequence([5] * prompt, index, prompt + output))
        return one

    fresh = SCRIPT["replay"](core, core.step, submit, [arrival for _, _, arrival in SCRIPT["REQUESTS"]])
    steps = DATA["batching"]["steps"][mode]
    assert [(step["cells"], step["free"]) for step in steps] == [(step["cells"], step["free"]) for step in fresh]
    widget(page, "trace").get_by_label("batches").select_option(mode)
    assert click(page, "trace", "all steps").startswith(f"{len(steps)} of {len(steps)} steps")
    preempted = sum(row.count("preempted") for row in cells(page, "trace"))
    assert preempted == (mode == "continuous") and click(page, "trace", "from the start").startswith("0 of")


def test_drafts_are_accepted_by_the_rule_of_the_engine(page):
    for index, run in enumerate(DATA["drafts"]["runs"]):
        own, answer = object(), []
        for step in run["steps"]:
            tokens = accepted([own] * len(step["drew"]), step["drew"], {own: step["draft"]})[own]
            assert (
                page.evaluate("([drew, draft]) => rooflab.accepted(drew, draft)", [step["drew"], step["draft"]])
                == tokens
            )
            answer += tokens
        assert answer[: len(run["answer"])] == run["answer"]
        widget(page, "drafts").get_by_label("an answer that").select_option(str(index))
        assert said(page, "drafts").startswith(
            f"{len(run['answer']) - 1} tokens in {len(run['steps']) - 1} decode steps"
        )


def test_a_curve_is_a_simulation(page):
    one, rates = DATA["curves"]["settings"][1], DATA["curves"]["rates"]
    kernels = KernelTimes(PRESETS["llama-3.1-8b"], get_device("h100"))
    own = ClockSettings(2**20, 16, one["max_num_seqs"], 8192, one["prefill_chunk"], one["prefix_caching"])
    found = summarize(simulate(kernels, SCRIPT["plan_of"](rates[5]), own.fitting(kernels)), DATA["curves"]["limits"])
    assert {name: float(f"{found[name]:.4g}") for name in SCRIPT["CURVES"]} == {n: one[n][5] for n in SCRIPT["CURVES"]}
    before = cells(page, "curves")
    widget(page, "curves").get_by_label("upwards").select_option("goodput_requests_per_s")
    assert cells(page, "curves") != before


def test_the_ledger_adds_up_and_the_server_is_asked(page):
    run = DATA["run"]
    for kind in ("prefill", "decode"):
        click(page, "answer", "next step")
        total = sum(row[5] for row in run["ledger"][kind]["rows"])
        assert cells(page, "answer")[-1][3] == page.evaluate("rooflab.digits", total), kind
    assert page.evaluate("rooflab.ms", run["itl_ms"]) in said(page, "answer").partition("TTFT")[0] or True
    click(page, "answer", "ask this server")
    page.wait_for_function("document.querySelector('[data-widget=answer]').innerText.includes('as this page got')")
    assert "Paris" in widget(page, "answer").inner_text()


def test_the_longest_gap_follows_the_size_of_a_chunk(page):
    for index, run in enumerate(DATA["chunks"]["runs"]):
        widget(page, "chunks").get_by_label("most prompt tokens").select_option(str(index))
        gaps = [step["ms"] for step in run["steps"][1:] if step["cells"][0] == "d"]
        assert said(page, "chunks").startswith(f"Longest gap of the others: {page.evaluate('rooflab.ms', max(gaps))}.")
