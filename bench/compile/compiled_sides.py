"""Prepares two source trees to compare: a git revision and the working tree.  Each has its own processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rooflab.bench.base.git import git
from rooflab.bench.compile.cases import Query
from rooflab.bench.compile.static import OWN_TREE, compilers, own_compilers, own_hash, why_unanswered
from rooflab.bench.compile.store import tree_hash
from rooflab.bench.core import ChildFailed, Pool
from rooflab.bench.revisions.repository import files_in, import_path, repository_of
from rooflab.bench.revisions.trees import check_contract, checked_out

Item = dict[str, Any]
"""A `KernelCase` as JSON, with a flag whether the store may keep its code, and with its op or file (`part`)."""


@dataclass(frozen=True)
class CompiledTree:
    """One source tree, with the processes that compile its kernels."""

    label: str
    workers: Pool
    tree: str
    """The hash of the tree's sources."""
    path: Path = OWN_TREE
    within: Mapping[str, Any] = field(default_factory=dict)
    """For another repository than Rooflab's: its tree (`within`), and its `files` that register the kernels."""

    def select(self, query: Query) -> list[Item]:
        """Returns the kernels and cases that `query` selects.  Raises `ValueError` if the worker process fails."""
        try:
            reply = self.workers.ask({"do": "select", "query": asdict(replace(query, kernels=())), **self.within})
        except ChildFailed as failed:
            raise ValueError(f"compare: {self.label}: {why_unanswered(failed)}") from failed
        if "error" in reply:
            raise ValueError(f"compare: {self.label}: {reply['error']}")
        return [item for item in reply["selected"] if not query.kernels or item["kernel"] in query.kernels]


@contextmanager
def two_sides(revision: str, files: Sequence[str]) -> Iterator[tuple[CompiledTree, CompiledTree]]:
    """Yields two source trees to compare: a git revision of a repository, and its working tree.  The repository is the
    one that contains the kernel files `files`.  If `files` is empty, it is the repository of the working directory.
    Outside of any repository, it is Rooflab's own.  Raises `ValueError` on an unknown revision."""
    # Both sides use the same compilers, even where the revision pins others, so that only the kernels differ.
    repository, own_label = repository_of(files, OWN_TREE), "the working tree"
    with ExitStack() as exit_stack:
        tree = exit_stack.enter_context(checked_out(repository or OWN_TREE, revision))
        if repository is None:
            path = tree.path / git(OWN_TREE, "rev-parse", "--show-prefix")
            check_contract(path, tree.label, "compare")
            workers = compilers(path)
            exit_stack.callback(workers.stop)
            own_tree = CompiledTree(own_label, own_compilers(), own_hash())
            yield CompiledTree(tree.label, workers, tree_hash(path), path), own_tree
            return
        tree_paths, tree_labels = (tree.path, repository), (tree.label, own_label)
        code_trees = []
        for path, label, sources in zip(tree_paths, tree_labels, files_in(tree_paths, repository, files), strict=True):
            pool = compilers(OWN_TREE, import_path(repository, path))
            exit_stack.callback(pool.stop)
            code_trees.append(CompiledTree(label, pool, "", path, {"within": str(path), "files": [*map(str, sources)]}))
        yield code_trees[0], code_trees[1]
