"""Compiles Triton, Gluon and CUDA C++ kernels without a GPU, and reads the code: registers, spills, wgmma, TMA.

The bundled `ptxas` and NVRTC need no device, and Triton's bundled `cuobjdump` reads the compiled code.  Separate
processes (`compile_worker.py`) do the work, because a process with Triton's interpreter cannot compile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from rooflab.bench.compile import sass
from rooflab.bench.compile.cases import KernelCase, can_keep, check_backend
from rooflab.bench.compile.sass_flow import Loop, find_loops
from rooflab.bench.compile.store import Store, tree_hash
from rooflab.bench.core import ChildFailed, Pool
from rooflab.kernels import registry
from rooflab.reference.spec import Case

WORKER_MODULE = "rooflab.bench.compile.compile_worker"
COMPILE_LIMIT_S = 300.0
"""The time limit of one compilation, in seconds.  A compilation normally takes about half a second."""


class CompileFailure(RuntimeError):
    """Reports that a kernel did not compile.  The message comes from the compiler or from the kernel's launcher."""

    def __init__(self, text: str, refused: bool = False):
        super().__init__(text)
        self.refused = refused
        """Whether the kernel does not exist, or says that it does not take the case."""


def compilers(tree: Path | None = None, import_path: str | None = None) -> Pool:
    """Returns a pool that compiles kernels of `tree`, by default of this program.  `import_path`: its `PYTHONPATH`."""
    path = {} if import_path is None else {"PYTHONPATH": import_path}
    environment = {"TRITON_INTERPRET": None, **path}
    return Pool(WORKER_MODULE, environment=environment, limit_s=COMPILE_LIMIT_S, tree=tree)


own_compilers = cache(compilers)
"""Returns the pool of processes that compile the kernels of the running source tree."""
OWN_TREE = Path(registry.__file__).resolve().parent.parent
"""The tree that this process runs."""

own_hash = cache(partial(tree_hash, OWN_TREE))
"""Returns the hash of this program's sources, computed once.  They do not change while the process runs."""


def why_unanswered(failed: ChildFailed) -> str:
    """Returns the reason why a compiling process gave no answer, with the last lines that the process wrote."""
    return f"the process ended with {failed.how}: {failed.words}" if failed.status is not None else str(failed)


@dataclass(frozen=True)
class CompiledInfo:
    """Describes one compiled kernel of one launch."""

    name: str
    target: str
    """The architecture, such as `sm_90a`."""
    grid: tuple[int, ...]
    launches: int
    """The number of launches of this kernel on this grid."""
    num_warps: int
    """The number of warps that the launcher requested, without the warps that warp specialisation adds."""
    num_stages: int
    threads: int
    """Threads per CTA; more than 32 * num_warps if warps are specialised."""
    registers: int
    """Registers per thread."""
    stack_bytes: int
    """Stack bytes per thread, including spilled registers."""
    shared_bytes: int
    """Shared-memory bytes per CTA."""
    opcodes: Mapping[str, int]
    """The number of occurrences of each SASS opcode with its modifiers, such as `HGMMA.64x128x16.F32.BF16`."""
    ptx: str
    """Triton's PTX; empty for CUDA C++, because NVRTC compiles it directly to machine code."""
    sass: str
    """The machine code as `cuobjdump -sass` prints it."""
    backend: str = "triton"
    """`triton`, `gluon` or `cuda`."""
    ctas: int = 0
    """CTAs of one launch; each CTA of a cluster counts."""
    ir: str = ""
    """Triton's or Gluon's IR of the kernel.  The IR shows the requested options."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """The options that the launcher set, such as `num_warps` and `num_stages`."""
    warnings: tuple[str, ...] = ()
    """The assembler's warnings about code with wgmma."""
    tried: int = 0
    """The number of configs that Triton's autotuner tries before this one.  Predictions use the first config."""
    code_hash: str = ""
    """sha256 of instructions and constants.  The hash does not change if the source only moves to other lines."""

    def count(self, *families: str) -> int:
        """Counts the instructions with the given names.  A name is an opcode up to its first dot, such as `HGMMA`."""
        return sum(opcode_count for opcode, opcode_count in self.opcodes.items() if opcode.split(".")[0] in families)

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """The number of instructions of each family of `sass.FAMILIES` in the whole code."""
        return sass.count_families(self.opcodes.items())

    @cached_property
    def loops(self) -> list[Loop]:
        """Returns every loop in the code."""
        return find_loops(sass.SassFunction(self.name, sass.parse_code(self.sass)))

    @property
    def spill_loads(self) -> int:
        """The number of loads from thread-local memory in the code."""
        return self.counts["spill_load"]

    @property
    def spill_stores(self) -> int:
        """The number of stores to thread-local memory in the code."""
        return self.counts["spill_store"]

    @property
    def uses_tf32(self) -> bool:
        """Returns whether a matrix multiplication rounds its fp32 operands to TF32, which has 10 mantissa bits."""
        return any("TF32" in opcode.split(".") for opcode in self.opcodes) or ".tf32" in self.ptx

    @property
    def uses_warp_specialization(self) -> bool:
        """Returns whether the code moves registers between warps.  Only warp-specialised code does this."""
        return self.count("USETMAXREG") > 0 or "setmaxnreg" in self.ptx


CompileOutcome = list[CompiledInfo] | CompileFailure
"""The answer to a request: the launched kernels, or the failure."""
_compiled_kernels: dict[KernelCase, list[CompiledInfo]] = {}
"""The compiled kernels of this process's own tree, whose sources do not change while the process runs.  Kernels with a
requested config are not kept: there may be a thousand configs, each with half a megabyte of text."""


ProgressCallback = Callable[[str], None]


def compile_kernels(
    requests: Sequence[KernelCase], store: Store | None = None, done: ProgressCallback = lambda text: None
) -> list[CompileOutcome]:
    """Compiles each request for sm_90a without a GPU.  Returns, for each request, its compiled kernels or the failure.

    Calls `done` after each compilation.  If `store` already has the code for identical sources, nothing is compiled.
    Raises `ValueError` on a kernel whose backend has no compiled code."""
    for request in requests:
        if request.file is None:
            check_backend(request.registered)
    new_requests = [request for request in dict.fromkeys(requests) if request not in _compiled_kernels]
    cache_flags = [request.file is None and can_keep(request.registered) for request in new_requests]
    messages = [{"do": "compile", **request.to_json()} for request in new_requests]
    worker_answers = compile_in(own_compilers(), messages, cache_flags, own_hash() if store else "", store, done)
    results = dict(zip(new_requests, worker_answers, strict=True))
    remembered_results = {r: result for r, result in results.items() if r.file is None and r.config is None}
    _compiled_kernels.update({r: result for r, result in remembered_results.items() if isinstance(result, list)})
    return [results[request] if request in results else _compiled_kernels[request] for request in requests]


def compile_in(
    workers: Pool,
    messages: Sequence[Mapping[str, Any]],
    keeps: Sequence[bool],
    tree: str,
    store: Store | None = None,
    done: ProgressCallback = lambda text: None,
) -> list[CompileOutcome]:
    """Compiles every kernel case in `messages` (JSON of `KernelCase`) in the processes `workers`.

    `tree` is the hash of the source files.  `keeps` has one flag per message: whether `store` caches the answer.
    """
    keys = [store.key(message, tree) if store and keep else None for message, keep in zip(messages, keeps, strict=True)]
    worker_answers = [store.read(store_key) if store and store_key else None for store_key in keys]
    new_indices = [index for index, reply in enumerate(worker_answers) if reply is None]
    for reply in worker_answers:
        if reply is not None:
            done("")
    for index, reply in zip(new_indices, workers.ask_all(messages[index] for index in new_indices), strict=True):
        done("")
        if isinstance(reply, ChildFailed):
            reply = {"error": why_unanswered(reply), "where": "", "refused": False}
        worker_answers[index] = reply
        store_key = keys[index]
        if store and store_key and "error" not in reply:
            store.write(store_key, reply)
    return [_result(message, reply or {}) for message, reply in zip(messages, worker_answers, strict=True)]


def _result(message: Mapping[str, Any], answer: Mapping[str, Any]) -> CompileOutcome:
    if "error" in answer:
        case_name = f"{message['op']}/{message['kernel']} at {Case(**message['case']).id} in {message['scheme']}"
        location = f" ({answer['where']})" if answer["where"] else ""
        return CompileFailure(f"{case_name}: {answer['error']}{location}", answer["refused"])
    return [info_of(kernel) for kernel in answer["kernels"]]


def info_of(kernel: Mapping[str, Any]) -> CompiledInfo:
    """Makes a `CompiledInfo` from the entry of one kernel in the result of `compile_worker.describe`."""
    tuple_fields = {name: tuple(kernel[name]) for name in ("grid", "warnings")}
    return CompiledInfo(**{**kernel, **tuple_fields})
