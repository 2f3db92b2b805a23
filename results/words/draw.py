"""Draws 60 docstrings and 60 names for a reader: `python results/words/draw.py SEED`, of the five layers.

`draw.py SEED FOLDER PATH...` draws of files and folders in FOLDER, such as the standard library, for comparison.
"""

from __future__ import annotations

import ast
import random
import sys
from pathlib import Path

seed, *places = sys.argv[1:]
root, paths = Path(__file__).resolve().parents[2], ["reference", "roofline", "kernels", "engine", "bench"]
if places:
    root, paths = Path(places[0]), places[1:]
documented, named = list[str](), set[str]()
for path in paths:
    for file in sorted((root / path).rglob("*.py")) if (root / path).is_dir() else [root / path]:
        place = file.relative_to(root).as_posix()
        if places and "/test" in place:
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                entry = f"{place}, {getattr(node, 'name', 'the file')}: {text}"
                if not places or len(entry.split()) <= 120:  # else a tutorial
                    documented.append(entry)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                named.add(f"{place}: {node.id}")
for title, entries in (("docstrings", documented), ("names", sorted(named))):
    print(f"# {title}", *random.Random(int(seed)).sample(entries, 60), sep="\n\n")
