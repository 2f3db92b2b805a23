"""Sections 1 to 10 of the page of `rooflab learn`: their numbers are the product's own, and their widgets move."""

import json
import random
from unittest.mock import patch

import needs
import pytest
import torch

from rooflab.bench.learn.learn_data import load
from rooflab.bench.learn.learn_page import write_page
from rooflab.reference import llama
from rooflab.reference.sample_law import support
from rooflab.roofline.architecture import PRESETS
from rooflab.roofline.steps import step_ops

pytestmark = [pytest.mark.more, pytest.mark.needs("browser")]
weights = pytest.mark.needs("weights")
DATA = load()
RUN, INSIDE = DATA["run"], DATA["inside"]
PROMPT = [token for token, _ in RUN["prompt"]]
TEXTS = [
    *("a", " ", "\n", "Hello, world!", "12345", "3.14 and 1,000", "  two  spaces ", "\t\ttab\r\n", "it's we'll I'd 'S"),
    *(
        "naïve café",
        "Zürich",
        "日本語です",
        "Привет, мир",
        "مرحبا",
        "हिन्दी",
        "👍🏽 👨‍👩‍👧",
        "🇫🇷",
        "e\u0301",
        "½ ² ٣ Ⅷ",
        "a1b2",
    ),
    *(
        "<|im_start|>user\nHi<|im_end|>",
        "x<|im_end|",
        "<filename><file_sep>",
        "\ufeffa",
        "a\u00a0b",
        "\u200b",
        "a\u0085b",
    ),
    *(
        "def f(x):\n    return x  # ok\n",
        "\x00\x04\x1f",
        "\U000f0000",
        "ß" * 40,
        "http://a.b/c?d=e&f",
        "...!!??",
        "    x\n\n\n  y",
    ),
]
SETTINGS = [
    (1, 0, 1, 0), (0.7, 0, 0.9, 0), (1.5, 40, 1, 0), (1, 0, 1, 0.1), (0.5, 10, 0.5, 0.05), (2, 1000, 0.99, 0.01),
    (1, 1, 1, 0), (1, 0, 0.05, 0),
]  # fmt: skip


@pytest.fixture(scope="session")
def page(tmp_path_factory):
    """The page with all widgets open, and the network off; fails on a request, a console message or an error in it."""
    from playwright.sync_api import sync_playwright

    file = tmp_path_factory.mktemp("learn") / "learn.html"
    assert write_page(file)["bytes"] < 2e6
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=needs.browser(), args=["--no-sandbox"])
        page, heard = started.new_context(offline=True).new_page(), []
        page.on("request", lambda request: heard.append(request.url))
        page.on("console", lambda message: heard.append(message.text))
        page.on("pageerror", lambda error: heard.append(str(error)))
        page.goto(file.as_uri())
        page.evaluate("Promise.all([...document.querySelectorAll('[data-widget]')].map(rooflab.open))")
        yield page
        assert [one for one in heard if one != file.as_uri() and not one.startswith(("data:", "blob:"))] == []
        started.close()


@pytest.fixture(scope="session")
def opened():
    from rooflab.engine.load.models import open_model

    arch, tokenizer, tensors, *_ = open_model("smollm2-135m", False, 0, torch.device("cpu"))
    return arch, tokenizer, dict(tensors)


@pytest.fixture(scope="session")
def reference(opened):
    """What the reference computes for a list of tokens: logits, weights by layer, and the inputs of norms and silu."""

    def call(tokens):
        seen, originals = {"softmax": [], "norm": [], "silu": []}, (torch.Tensor.softmax, llama.norm, llama.silu)

        def keep(name, value):
            seen[name].append(value)
            return value

        softmax, norm, silu = originals
        with (
            patch.object(torch.Tensor, "softmax", lambda x, dim: keep("softmax", softmax(x, dim))),
            patch.object(llama, "norm", lambda arch, x, weight: norm(arch, keep("norm", x), weight)),
            patch.object(llama, "silu", lambda x: silu(keep("silu", x))),
        ):
            return llama.logits(opened[0], opened[2], tokens), seen

    return call


def close(found, expected, **tolerance):
    found, expected = (torch.as_tensor(one, dtype=torch.float64) for one in (found, expected))
    torch.testing.assert_close(found, expected, **{"rtol": 1e-4, "atol": 1e-4} | tolerance)


def shown_in(page, widget, selector):
    return page.locator(f"[data-widget={widget}] {selector}").all_text_contents()


def _percent(share):
    return "<0.1%" if 0 < share < 0.0005 else f"{100 * share:.1f}%"


@weights
def test_any_text_has_the_tokens_of_the_engine(page, opened):
    draw = random.Random(0)
    kinds = [
        "ab eE'st",
        "0123456789",
        " \t\n\u00a0\u2003",
        "éßøñ",
        "漢字かな",
        "😀👍🏽",
        "<|im_end|>",
        "!?.,;(){}",
        "\x01\x06",
    ]
    mixed = ["".join(draw.choice(draw.choice(kinds)) for _ in range(draw.randint(1, 40))) for _ in range(300)]
    any_sign = ["".join(chr(draw.randint(0, 0xD7FF)) for _ in range(20)) for _ in range(100)]
    asked = TEXTS + mixed + any_sign
    script = (
        "async texts => { const v = await rooflab.data('vocabulary'); return texts.map(t => rooflab.tokenize(v, t)) }"
    )
    for text, ids in zip(asked, page.evaluate(script, asked), strict=True):
        assert ids == list(opened[1]._tokenizer(text)["input_ids"]), repr(text)


@weights
def test_each_token_has_the_name_of_the_engine(page, opened):
    script = "async n => { const v = await rooflab.data('vocabulary'); return Array.from(Array(n).keys(), i => rooflab.tokenName(v, i)) }"
    assert page.evaluate(script, 49_152) == [opened[1].named(token)[0] for token in range(49_152)]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_sampling_keeps_the_tokens_of_the_reference(page, setting):
    named = dict(zip(("temperature", "top_k", "top_p", "min_p"), setting, strict=True))
    script = "async s => rooflab.distribution(rooflab.logits(await rooflab.data('logits')), s)"
    ids, found = zip(*page.evaluate(script, named), strict=True)
    logits = DATA["logits"]["largest"] - torch.tensor(DATA["logits"]["below"], dtype=torch.float64) / 256
    law = support(logits, *setting)
    assert sorted(ids) == law.kept.nonzero().flatten().tolist()
    close(found, law.probabilities[list(ids)], rtol=1e-9)


@weights
def test_the_run_and_its_logits_are_those_of_the_reference(reference):
    logits, _ = reference(PROMPT + [token for token, _ in RUN["answer"]])
    found = DATA["logits"]["largest"] - torch.tensor(DATA["logits"]["below"]) / 256
    close(found, logits[len(PROMPT) - 1], rtol=0, atol=1 / 512 + 1e-4)
    for step, row in zip(RUN["steps"], logits[len(PROMPT) - 1 :], strict=False):
        best = row.softmax(-1).topk(5)
        assert [token for token, *_ in step["top"]] == best.indices.tolist() and step["token"] == best.indices[0]
        close([p for *_, p in step["top"]], best.values)


@weights
def test_any_head_of_any_text_has_the_weights_of_the_reference(page, opened, reference):
    for index, text in enumerate(DATA["attention"]["texts"]):
        seen = torch.stack(reference(opened[1].encode("".join(text["tokens"])))[1]["softmax"])
        script = (
            "async ([i, n]) => { const [t, ns] = [(await rooflab.data('attention')).texts[i], [...Array(n).keys()]];"
        )
        script += " return [...Array(30).keys()].map(l => [...Array(9).keys()].map(h => ns.map(q => ns.map(k =>"
        script += " k <= q ? rooflab.weight(t, l, h, q, k) : 0)))) }"
        close(page.evaluate(script, [index, len(text["tokens"])]), seen, rtol=0, atol=5.1e-4)


@weights
def test_the_head_the_norms_and_the_gate_of_the_run_are_those_of_the_reference(page, reference):
    seen = reference(PROMPT)[1]
    weight = seen["softmax"][INSIDE["layer"]][INSIDE["head"]]
    for token in (0, 10, 29, 36):
        page.locator("[data-widget=one_head] .chips button").nth(token).click()
        shown = shown_in(page, "one_head", ".chips small")
        assert shown == [_percent(w) for w in weight[token, : token + 1].tolist()] + ["later"] * (36 - token)
    close(INSIDE["residual"], torch.stack([x.norm(dim=-1) for x in seen["norm"]]), atol=1e-3)
    page.locator("[data-widget=residual] select").select_option("29")
    assert shown_in(page, "residual", "tr:last-child td")[-1] == f"{seen['norm'][-1][29].norm():.3g}"
    gate = seen["silu"][INSIDE["mlp_layer"]]
    assert INSIDE["gate"]["counts"] == [int(((gate >= x / 2) & (gate < (x + 1) / 2)).sum()) for x in range(-16, 16)]


@weights
def test_the_neighbours_are_those_with_the_largest_cosine(page, opened):
    unit = torch.nn.functional.normalize(opened[2]["model.embed_tokens.weight"].float(), dim=-1)
    for token, name, near in DATA["neighbours"]["tokens"][::50]:
        page.locator("[data-widget=neighbours] select").select_option(str(token))
        best = (unit @ unit[token]).topk(9)
        names = [json.dumps(opened[1].named(i)[0], ensure_ascii=False) for i in best.indices.tolist()]
        assert shown_in(page, "neighbours", ".text span:first-child") == names[1:] and opened[1].named(token)[0] == name
        close([cosine for _, cosine in near], best.values[1:])


def test_rope_and_silu_are_those_of_the_reference(page):
    arch, x = PRESETS["smollm2-135m"], torch.tensor(INSIDE["query"])
    cos, sin = llama.rotation(arch, 200)
    found = page.evaluate("async () => { const { query, rope } = await rooflab.data('inside');"
                          " return [...Array(200).keys()].map(at => rooflab.rotated(query, at, rope)) }")  # fmt: skip
    close(found, llama.rotate(x.expand(200, -1), cos, sin))
    gate = torch.linspace(-8, 8, 99, dtype=torch.float64)
    close(page.evaluate("xs => xs.map(rooflab.silu)", gate.tolist()), torch.nn.functional.silu(gate))


@pytest.mark.parametrize("name", PRESETS)
def test_a_model_has_the_parameters_and_the_flops_of_the_product(page, name):
    page.locator("[data-widget=parts] select").select_option(name)
    shown, counted = shown_in(page, "parts", "td"), PRESETS[name].parameters()
    flops = page.evaluate("async n => rooflab.flopsPerToken((await rooflab.data('models')).models[n])", name)
    gemms = [op for op in step_ops(PRESETS[name], "decode", 1, 1, "bf16", "bf16", 1) if op.op == "gemm"]
    assert flops == sum(op.calls * op.cost.flops for op in gemms)
    assert shown[:2] == [str(PRESETS[name].num_layers), f"{counted.total:,}"]


MOVES = {
    "next_token": ("button:last-of-type", "Enter"), "tokens": ("input", "7"), "neighbours": ("select", "ArrowDown"),
    "one_head": ("button >> nth=3", "Space"), "heatmap": ("input >> nth=1", "ArrowRight"),
    "rope": ("input >> nth=0", "ArrowRight"), "swiglu": ("input >> nth=1", "ArrowLeft"), "residual": ("select", "ArrowUp"),
    "parts": ("select", "ArrowUp"), "sampling": ("input >> nth=2", "ArrowLeft"),
}  # fmt: skip


@pytest.mark.parametrize("widget", MOVES)
def test_the_keyboard_changes_what_a_widget_shows(page, widget):
    root, (control, key) = page.locator(f"[data-widget={widget}]"), MOVES[widget]
    before = root.inner_text()
    root.locator(control).press(key)
    assert root.inner_text() != before
