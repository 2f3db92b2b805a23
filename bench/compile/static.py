"""Compiles Triton, Gluon and CUDA C++ kernels with no GPU, and reads what came out: registers, spills, wgmma, TMA.

The bundled `ptxas` and NVRTC need no device, and Triton's bundled `cuobjdump` reads the cubin.  The work is done in
processes of their own (`worker.py`), because a process under Triton's interpreter cannot compile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from rooflab.bench.compile import sass
from rooflab.bench.compile.cases import can_keep, check_backend
from rooflab.bench.compile.flow import Loop, find_loops
from rooflab.bench.compile.store import Store, tree_hash
from rooflab.bench.processes.child import ChildFailed, Died, Pool, command_for, environment_without
from rooflab.kernels import registry
from rooflab.kernels.registry import get_kernel
from rooflab.reference.spec import Case, Scheme

WORKER = "rooflab.bench.compile.worker"
TIMEOUT_S = 300.0
"""A compile takes about half a second; one that takes this long will not end."""


class CompileFailure(RuntimeError):
    """A kernel did not compile; the text is the compiler's or the launcher's."""

    def __init__(self, text: str, refused: bool = False):
        super().__init__(text)
        self.refused = refused
        """Whether there is no such kernel, or it says that it does not take the case."""


def compilers(tree: Path | None = None) -> Pool:
    """Processes that compile the kernels of this tree, or those in the folder `tree`."""
    return Pool(command_for(WORKER, tree=tree), environment_without("TRITON_INTERPRET"), TIMEOUT_S)


@cache
def own_compilers() -> Pool:
    """Those of this tree's kernels."""
    return compilers()


OWN_TREE = Path(registry.__file__).resolve().parent.parent
"""The tree that this process runs."""


@cache
def own_hash() -> str:
    """Of the sources of this tree, which do not change under a process."""
    return tree_hash(OWN_TREE)


def why_unanswered(failed: ChildFailed) -> str:
    """Why a compiling process gave no answer, with what it wrote last."""
    return f"the process ended with {failed.how}: {failed.words}" if isinstance(failed, Died) else str(failed)


@dataclass(frozen=True)
class CompiledInfo:
    """One compiled kernel of one launch."""

    name: str
    target: str
    """`sm_90a`."""
    grid: tuple[int, ...]
    launches: int
    """How often the launcher launched this kernel on this grid."""
    num_warps: int
    """As the launcher asked, those that warp specialisation adds left out."""
    num_stages: int
    threads: int
    """Per block; more than 32 * num_warps where warps are specialised."""
    registers: int
    """Per thread."""
    stack_bytes: int
    """Per thread, spilled registers included."""
    shared_bytes: int
    """Per block."""
    opcodes: Mapping[str, int]
    """How often each SASS instruction occurs, modifiers included (`HGMMA.64x128x16.F32.BF16`)."""
    ptx: str
    """Triton's; empty for CUDA C++, which NVRTC compiles to machine code at once."""
    sass: str
    """As `cuobjdump -sass` prints it."""
    backend: str = "triton"
    """`triton`, `gluon` or `cuda`."""
    ctas: int = 0
    """Blocks of one launch, those of a cluster counted one by one."""
    ir: str = ""
    """Triton's or Gluon's own form of the kernel, in which what was asked for can be read."""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """Options that the launcher named: `num_warps`, `num_stages`."""
    indirect: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Where indirect branches may go, by their address."""
    warnings: tuple[str, ...] = ()
    """What the assembler warned of, in a code with wgmma."""
    code_hash: str = ""
    """sha256 of instructions and constants: the same for the same code, also where its source moved to other lines."""

    def count(self, *families: str) -> int:
        """Instructions of these families, the part before the first dot (`HGMMA`, `LDL`)."""
        return sum(number for opcode, number in self.opcodes.items() if opcode.split(".")[0] in families)

    @cached_property
    def counts(self) -> Mapping[str, int]:
        """Instructions of each of `sass.FAMILIES` in the whole code."""
        return sass.count_families(self.opcodes.items())

    @cached_property
    def loops(self) -> list[Loop]:
        """Every loop of the code."""
        return find_loops(sass.Function(self.name, sass.parse_code(self.sass), indirect=self.indirect))

    @property
    def spill_loads(self) -> int:
        """Loads from thread-local memory in the code."""
        return self.counts["spill_load"]

    @property
    def spill_stores(self) -> int:
        """Stores to thread-local memory in the code."""
        return self.counts["spill_store"]

    @property
    def uses_wgmma(self) -> bool:
        """Whether warpgroup tensor-core instructions are there, Hopper's only way to its full matrix rate."""
        return self.counts["wgmma"] > 0

    @property
    def uses_tensor_cores(self) -> bool:
        """Whether any tensor-core instruction is there, wgmma, Blackwell's, or the older mma."""
        return any(self.counts[family] for family in sass.TENSOR_CORES)

    @property
    def uses_tf32(self) -> bool:
        """Whether a matrix product rounds its fp32 operands to TF32's 10 bits."""
        return any("TF32" in opcode.split(".") for opcode in self.opcodes) or ".tf32" in self.ptx

    @property
    def uses_tma(self) -> bool:
        """Whether tiles come or go by the tensor memory accelerator."""
        return self.counts["tma"] > 0

    @property
    def uses_warp_specialization(self) -> bool:
        """Whether registers move between warps, which only specialised warps do."""
        return self.count("USETMAXREG") > 0 or "setmaxnreg" in self.ptx


class Request(NamedTuple):
    """What to compile."""

    op: str
    kernel: str
    case: Case
    scheme: Scheme
    file: Path | None = None
    """The file that registers the kernel, where it is not in the tree."""
    config: Any = None
    """The config to hold a tunable kernel to, one of its `config_type`; None leaves the choice to its launcher."""

    def to_json(self) -> dict[str, Any]:
        """The message to a compiling process."""
        file, config = str(self.file) if self.file else None, None if self.config is None else asdict(self.config)
        asked = {"op": self.op, "kernel": self.kernel, "case": dict(self.case), "scheme": self.scheme.name}
        return {"do": "compile", **asked, "file": file, "config": config}


def compile_kernel(
    op: str, kernel_name: str, case: Case, scheme: Scheme, *, file: Path | None = None, config: Any = None
) -> list[CompiledInfo]:
    """Every kernel of ours that `op`/`kernel_name` launches for `case`, compiled for sm_90a with no GPU.

    Raises `ValueError` on a kernel that has no code of its own, and `CompileFailure` where it does not compile, refuses
    the case, or reads the values of its tensors, which are meta here.
    """
    found = compile_kernels([Request(op, kernel_name, case, scheme, file, config)])[0]
    if isinstance(found, CompileFailure):
        raise found
    return found


Found = list[CompiledInfo] | CompileFailure
"""What a request gives: its launched kernels, or why it has no answer."""
_done: dict[Request, list[CompiledInfo]] = {}
"""What this process has compiled of its own tree, whose sources do not change under it, and of no config asked for: of
those there may be a thousand, each half a megabyte of text."""


def compile_kernels(requests: Sequence[Request], store: Store | None = None) -> list[Found]:
    """`compile_kernel` of every request, in their order, on all cores; a failure stands in the place of its result.

    With a `store`, what it holds of the very same sources is not compiled again.  Raises `ValueError` on a kernel that
    has no code of its own.
    """
    for request in requests:
        if request.file is None:
            check_backend(get_kernel(request.op, request.kernel))
    new = [request for request in dict.fromkeys(requests) if request not in _done]
    kept = [request.file is None and can_keep(get_kernel(request.op, request.kernel)) for request in new]
    found = compile_in(own_compilers(), [r.to_json() for r in new], kept, own_hash() if store else "", store)
    results = dict(zip(new, found, strict=True))
    own = {r: result for r, result in results.items() if r.file is None and r.config is None}
    _done.update({r: result for r, result in own.items() if isinstance(result, list)})
    return [results[request] if request in results else _done[request] for request in requests]


def compile_in(
    workers: Pool, messages: Sequence[Mapping[str, Any]], kept: Sequence[bool], tree: str, store: Store | None = None
) -> list[Found]:
    """Every message (`Request.to_json`) compiled by `workers`, whose tree has the hash `tree`.

    The `store` takes those answers of which `kept` is true.
    """
    keys = [store.key(message, tree) if store and keep else None for message, keep in zip(messages, kept, strict=True)]
    answers = [store.read(key) if store and key else None for key in keys]
    missing = [index for index, answer in enumerate(answers) if answer is None]
    for index, answer in zip(missing, workers.ask_all(messages[index] for index in missing), strict=True):
        if isinstance(answer, ChildFailed):
            answer = {"error": why_unanswered(answer), "where": "", "refused": False}
        answers[index] = answer
        key = keys[index]
        if store and key and "error" not in answer:
            store.write(key, answer)
    return [_result(message, answer or {}) for message, answer in zip(messages, answers, strict=True)]


def _result(message: Mapping[str, Any], answer: Mapping[str, Any]) -> Found:
    if "error" in answer:
        what = f"{message['op']}/{message['kernel']} at {Case(**message['case']).id} in {message['scheme']}"
        place = f" ({answer['where']})" if answer["where"] else ""
        return CompileFailure(f"{what}: {answer['error']}{place}", answer["refused"])
    return [_info(kernel) for kernel in answer["kernels"]]


def _info(kernel: Mapping[str, Any]) -> CompiledInfo:
    lists = {name: tuple(kernel[name]) for name in ("grid", "warnings")}
    indirect = {address: tuple(targets) for address, targets in kernel["indirect"]}
    return CompiledInfo(**{**kernel, **lists, "indirect": indirect})
