"""Draws 60 docstrings and 60 names of the five layers for a reader: `python results/words/draw.py SEED`."""

from __future__ import annotations

import ast
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
documented, named = list[str](), set[str]()
for layer in ("reference", "roofline", "kernels", "engine", "bench"):
    for file in sorted((ROOT / layer).rglob("*.py")):
        place = file.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                documented.append(f"{place}, {getattr(node, 'name', 'the file')}: {text}")
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                named.add(f"{place}: {node.id}")
for title, entries in (("docstrings", documented), ("names", sorted(named))):
    print(f"# {title}", *random.Random(int(sys.argv[1])).sample(entries, 60), sep="\n\n")
