"""Writes docs/ladders/: a page and its drawings for each ladder, from bench/learn/data/levels.json and ladders.toml.

python results/learn/ladders.py
"""

import tomllib
from pathlib import Path
from textwrap import fill
from typing import Any

from rooflab.bench.learn.drawing import facts_of_kernel, figures, from_l2, hbm
from rooflab.bench.learn.learn_data import load
from rooflab.bench.learn.sketch import file_of, size
from rooflab.kernels._files import write_whole

OUT = Path(__file__).resolve().parents[2] / "docs/ladders"
WORDS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
HEAD, NOTE = WORDS.pop("head"), WORDS.pop("note")


def shown(kernel: dict[str, Any]) -> dict[str, Any]:
    """Returns a kernel's counts as texts, beside its sizes and config."""
    texts = {"hbm": size(hbm(kernel)), "l2": size(from_l2(kernel)), "shared": "not seen", "instructions": ""}
    if kernel["basis"] == "modelled":
        texts |= {name: f"~{texts[name]}" for name in ("hbm", "l2")}
    else:
        moved = kernel["shared_read_bytes"] + kernel["shared_write_bytes"]
        texts |= {"shared": size(moved), "instructions": size(kernel["instructions"], "")}
    return {**kernel, **texts, "file": f"[`{kernel['name']}`](../../{kernel['code']})"}


def page_of(words: dict[str, Any], data: dict[str, Any]) -> str:
    """Returns the page of one ladder as Markdown."""
    facts, drawn, tables = dict[str, Any](), figures(data), ["\n## Which rung saves which bytes\n"]
    for op in words["ops"]:
        for index, case in enumerate(data["levels"]["ops"][op]):
            needed = f"{case['scheme']}. {case['why']} The op needs {size(case['least_bytes'])} of HBM."
            tables += [fill(f"**{op}**, `{case['case']}`, {needed}", 118), "", HEAD]
            for kernel in case["kernels"]:
                name = kernel["name"] + (f"#{index}" if index else "")
                facts[f"{op}/{name}"] = one = shown(facts_of_kernel(data["levels"], op, name))
                saves = words["saves"][f"{op}/{kernel['name']}"]
                tables.append("| {file} | {} | {hbm} | {l2} | {shared} | {instructions} |".format(saves, **one))
            tables.append("")
    parts = [f"# {words['title']}\n", fill(words["intro"], 118), *tables, NOTE, ""]
    for rung in words["rungs"]:
        one = facts[rung["kernel"]]
        parts += [f"## {rung['kernel'].partition('#')[0]}", ""]
        for figure in (drawn[name] for name in rung.get("figures", ())):
            files = (f"![{figure.title}: {s.label}]({figure.name}-{n}.svg)" for n, s in enumerate(figure.states, 1))
            parts += [*files, ""]
        file = f"File: [`{one['code']}`](../../{one['code']})."
        parts += [fill(f"Ladder: {one['line']}. {rung['text'].format_map(facts)} {file}", 118), ""]
    told = [rung["kernel"] for rung in words["rungs"]]
    commands = [one["command"] for name, one in facts.items() if name in told or one["role"] == "naive"]
    return "\n".join([*parts, "## Count it again\n\n```sh", *commands, "```\n"])


def main() -> None:
    """Writes all pages and drawings."""
    data = load()
    for name, words in WORDS.items():
        write_whole(OUT / f"{name}.md", page_of(words, data))
    for figure in figures(data).values():
        for number, state in enumerate(figure.states, 1):
            write_whole(OUT / f"{figure.name}-{number}.svg", file_of(state.svg, state.label))


if __name__ == "__main__":
    main()
