"""The selection of what to compile, kept on disk: to find the most work, every case's inputs are made.

Making them on the meta device imports torch's compiler (1.2 s), which nothing else of a warm `rooflab static` needs.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rooflab.bench.compile.cases import COMPILED, Selected, module_of, select
from rooflab.bench.compile.revision import Query
from rooflab.bench.compile.sources import own_sources
from rooflab.bench.compile.store import Store
from rooflab.kernels import registry
from rooflab.reference.spec import Case, get_scheme


def select_kept(query: Query, store: Store | None) -> list[Selected]:
    """`cases.select` of the query; from the store where nothing has changed that it depends on."""
    keeping = Store(store.folder) if store else None  # another count of hits
    key = _key(query, keeping) if keeping else None
    answer = keeping.read(key) if keeping and key else None
    if answer is not None:
        return [_selected(item) for item in answer["selected"]]
    found = select(query.op, query.kernels, query.suites, query.cases, query.schemes, every_case=query.every_case)
    if keeping and key:
        keeping.write(key, {"selected": [item.to_json() for item in found]})
    return found


def _key(query: Query, store: Store) -> str | None:
    """None where a kernel or an op is from outside the tree, whose sources are not known."""
    if any(name.endswith(".py") for name in query.kernels):
        return None
    ops = [query.op] if query.op else list(registry.ops())
    kernels = [kernel for op in ops for kernel in registry.kernels(op).values() if kernel.backend in COMPILED]
    sources = own_sources()
    for kernel in kernels:
        if sources.of(module_of(kernel), kernel.op) is None:
            return None
    message = {"do": "select", **asdict(query), "known": [kernel.id for kernel in kernels]}
    return store.key(message, sources.all())


def _selected(item: dict[str, Any]) -> Selected:
    return Selected(registry.get_kernel(item["op"], item["kernel"]), Case(**item["case"]), get_scheme(item["scheme"]))
