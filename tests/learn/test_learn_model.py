"""Sections 1 to 10 of the page of `rooflab learn`: their numbers are the product's own, and their widgets move."""

import json
import random

import needs
import pytest
import torch
from learn.inside import TensorWatch

from rooflab.bench.learn.learn_data import load
from rooflab.bench.learn.learn_page import write_page
from rooflab.engine.load.models import open_model
from rooflab.reference import llama
from rooflab.reference.sample_law import support
from rooflab.roofline.architecture import PRESETS
from rooflab.roofline.steps import step_ops

pytestmark = [pytest.mark.more, pytest.mark.needs("browser")]
DATA = load()
RUN, INSIDE = DATA["run"], DATA["inside"]
PROMPT, ANSWER = ([token for token, _ in RUN[part]] for part in ("prompt", "answer"))
LOGITS = DATA["logits"]["largest"] - torch.tensor(DATA["logits"]["below"], dtype=torch.float64) / 256
TEXTS = (
    "a¦ ¦\n¦Hello, world!¦12345¦3.14 and 1,000¦  two  spaces ¦\t\ttab\r\n¦it's we'll I'd 'S¦naïve café¦日本語¦e\u0301"
    "¦مرحبا¦हिन्दी¦👍🏽 👨‍👩‍👧¦🇫🇷¦½ ² ٣ Ⅷ¦a1b2¦<|im_start|>user\nHi<|im_end|>¦x<|im_end|¦<repo_name><file_sep>¦\ufeffa"
    "¦a\u00a0b¦\u200b¦a\u0085b¦def f(x):\n    return x  # ok\n¦\x00\x04\x1fa\x06b¦\U000f0000¦ßßßß¦http://a.b/c?d=e&f¦Привет"
    "¦...!!??¦    x\n\n\n  y¦\u2003\u3000 ¦A'S'RE¦१२३"
).split("¦")
SETTINGS = "1,0,1,0 0.7,0,0.9,0 1.5,40,1,0 1,0,1,0.1 0.5,10,0.5,0.05 2,1000,0.99,0.01 1,1,1,0 1,0,0.05,0".split()
MOVES = "next_token:Enter tokens:7 neighbours:ArrowDown one_head:Space heatmap:ArrowDown parts:q rope:ArrowRight"
MOVES += " swiglu:ArrowLeft residual:ArrowUp sampling:ArrowLeft"


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page with all widgets open, and the network off; fails on a console message or an error in it."""
    from playwright.sync_api import sync_playwright

    file, heard = tmp_path_factory.mktemp("learn") / "learn.html", []
    write_page(file)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=needs.browser(), args=["--no-sandbox"])
        page = started.new_context(offline=True).new_page()
        page.on("console", lambda one: heard.append(one.text))
        page.on("pageerror", lambda one: heard.append(str(one)))
        page.goto(file.as_uri())
        page.evaluate("Promise.all([...document.querySelectorAll('[data-widget]')].map(rooflab.open))")
        yield page
        started.close()
    assert heard == []


@pytest.fixture(scope="module")
def opened():
    needs.skip_without("weights")
    arch, tokenizer, tensors, *_ = open_model("smollm2-135m", False, 0, torch.device("cpu"))
    return arch, tokenizer, dict(tensors)


def reference(opened, tokens):
    with TensorWatch() as watch:
        return llama.logits(opened[0], opened[2], tokens), vars(watch)


def ask(page, name, script, argument):
    return page.evaluate(f"async x => ({script})(await rooflab.data('{name}'), x)", argument)


def shown(page, widget, selector):
    return page.locator(f"[data-widget={widget}] {selector}").all_text_contents()


def percents(values):
    return ["<0.1%" if 0 < value < 0.0005 else f"{100 * value:.1f}%" for value in values]


def close(found, expected, rtol=1e-4, atol=1e-4):
    found, expected = (torch.as_tensor(one, dtype=torch.float64) for one in (found, expected))
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


def test_any_text_has_the_tokens_of_the_engine_and_each_token_its_name(page, opened):
    draw, signs = random.Random(0), ["<|im_end|>", " ", *"".join(TEXTS)]
    mixed = ["".join(draw.choices(signs, k=draw.randint(1, 40))) + "." for _ in range(300)]
    texts = [*TEXTS, *mixed, *("".join(chr(draw.randrange(0xD800)) for _ in range(20)) for _ in range(100))]
    found = ask(page, "vocabulary", "(v, texts) => texts.map(text => rooflab.tokenize(v, text))", texts)
    assert found == [opened[1].encode(text) for text in texts]
    names = ask(page, "vocabulary", "(v, n) => Array.from({ length: n }, (_, i) => rooflab.tokenName(v, i))", 49_152)
    assert names == [opened[1].named(token)[0] for token in range(49_152)]


@pytest.mark.parametrize("setting", SETTINGS)
def test_sampling_keeps_the_tokens_of_the_reference(page, setting):
    named = dict(zip(("temperature", "top_k", "top_p", "min_p"), json.loads(f"[{setting}]"), strict=True))
    kept = ask(page, "logits", "(record, named) => rooflab.distribution(rooflab.logits(record), named)", named)
    law, ids = support(LOGITS, **named), [token for token, _ in kept]
    assert sorted(ids) == law.kept.nonzero().flatten().tolist()
    close([p for _, p in kept], law.probabilities[ids], rtol=1e-9, atol=0)


def test_the_run_and_its_logits_are_those_of_the_reference(page, opened):
    logits = reference(opened, PROMPT + ANSWER)[0][len(PROMPT) - 1 :]
    close(LOGITS, logits[0], rtol=0, atol=1 / 512 + 1e-4)
    back, ahead = page.locator("[data-widget=next_token] button").all()
    [back.click(force=True) for _ in ANSWER]
    for step, row in zip(RUN["steps"], logits, strict=False):
        best = row.softmax(-1).topk(5)
        assert [token for token, *_ in step["top"]] == best.indices.tolist() and step["token"] == best.indices[0]
        close([p for *_, p in step["top"]], best.values)
        assert shown(page, "next_token", ".text span:last-child") == percents(p for *_, p in step["top"])
        ahead.click(force=True)


@pytest.mark.parametrize("index", [1, 8])
def test_all_heads_on_a_text_have_the_weights_of_the_reference(page, opened, index):
    calls = reference(opened, opened[1].encode("".join(DATA["attention"]["texts"][index]["tokens"])))[1]
    expected = torch.stack([result for _, result in calls["softmax"]])
    cells = torch.ones_like(expected).tril().nonzero()
    script = "({ texts }, [i, cells]) => cells.map(cell => rooflab.weight(texts[i], ...cell))"
    close(ask(page, "attention", script, [index, cells.tolist()]), expected[tuple(cells.T)], rtol=0, atol=5.1e-4)


def test_the_head_the_norms_and_the_gate_of_the_run_are_those_of_the_reference(page, opened):
    calls = reference(opened, PROMPT)[1]
    for token in (0, 10, 29, 36):
        page.locator("[data-widget=one_head] .chips button").nth(token).click()
        row = calls["softmax"][INSIDE["layer"]][1][INSIDE["head"], token, : token + 1]
        assert shown(page, "one_head", ".chips small") == percents(row.tolist()) + ["later"] * (36 - token)
    norms = torch.stack([args[0].norm(dim=-1) for args, _ in calls["square"]])
    close(INSIDE["residual"], norms)
    page.locator("[data-widget=residual] select").select_option("29")
    assert shown(page, "residual", "tr:last-child td")[-1] == f"{norms[-1, 29]:.3g}"
    gate = calls["silu"][INSIDE["mlp_layer"]][0][0]
    assert INSIDE["gate"]["counts"] == [((2 * gate).floor() == half).sum() for half in range(-16, 16)]


def test_the_neighbours_are_those_with_the_largest_cosine(page, opened):
    unit = torch.nn.functional.normalize(opened[2]["model.embed_tokens.weight"], dim=-1)
    for token, _, near in DATA["neighbours"]["tokens"][::50]:
        page.locator("[data-widget=neighbours] select").select_option(str(token))
        best = (unit @ unit[token]).topk(9)
        names = [json.dumps(opened[1].named(i)[0], ensure_ascii=False) for i in best.indices[1:].tolist()]
        assert shown(page, "neighbours", ".text span:first-child") == names
        close([cosine for _, cosine in near], best.values[1:])


def test_rope_and_silu_are_those_of_the_reference(page):
    script = "({ query, rope }, n) => Array.from({ length: n }, (_, at) => rooflab.rotated(query, at, rope))"
    turned = llama.rotate(torch.tensor(INSIDE["query"]), *llama.rotation(PRESETS["smollm2-135m"], 200))
    close(ask(page, "inside", script, 200), turned)
    gate = torch.linspace(-8, 8, 99, dtype=torch.float64)
    close(page.evaluate("xs => xs.map(rooflab.silu)", gate.tolist()), torch.nn.functional.silu(gate), rtol=1e-9)


@pytest.mark.parametrize("name", PRESETS)
def test_a_model_has_the_parameters_and_the_flops_of_the_product(page, name):
    page.locator("[data-widget=parts] select").select_option(name)
    gemms = [op for op in step_ops(PRESETS[name], "decode", 1, 1, "bf16", "bf16", 1) if op.op == "gemm"]
    flops = ask(page, "models", "({ models }, name) => rooflab.flopsPerToken(models[name])", name)
    assert flops == sum(op.calls * op.cost.flops for op in gemms)
    assert shown(page, "parts", "td")[:2] == [str(PRESETS[name].num_layers), f"{PRESETS[name].parameters().total:,}"]


@pytest.mark.parametrize("move", MOVES.split())
def test_a_key_changes_what_a_widget_shows(page, move):
    widget, key = move.split(":")
    root = page.locator(f"[data-widget={widget}]")
    before = root.inner_text()
    root.locator("input, select, button:enabled").first.press(key)
    assert root.inner_text() != before
