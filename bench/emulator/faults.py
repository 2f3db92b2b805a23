"""Names the rules of the GPU that a kernel may break, and describes a broken rule as a `Finding`.

Each place that finds a fault also names its rule.  All texts, JSON values and exceptions are made from a `Finding`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from rooflab.bench.compile.demangle import demangled
from rooflab.bench.emulator.text.syntax import Instruction, SizeTriple

Rule = Literal[
    "missing-fence", "race", "out-of-bounds", "misaligned", "unwritten-read", "deadlock", "endless", "barrier",
    "mbarrier-phase", "wgmma-registers", "early-exit", "output-not-written", "nondeterministic-sum",
    "dependent-launch", "stream-order", "invalid-use", "trap",
]  # fmt: skip
RULES: dict[Rule, tuple[str, str]] = {
    "missing-fence": (
        "Proxies; wgmma.fence",
        "No fence comes between accesses of two proxies to one place, or between a wgmma and a use of its registers",
    ),
    "race": ("Conflict and Data-races", "Nothing orders two accesses to the same memory, of which one is a write"),
    "out-of-bounds": (
        "State Spaces",
        "An access lies outside all tensors (or views) and variables, or writes constant memory",
    ),
    "misaligned": ("Addresses as Operands", "An address is not a multiple of the bytes that the instruction requires"),
    "unwritten-read": ("Initialization", "An instruction reads memory that has not been written"),
    "deadlock": ("barrier, mbarrier.try_wait", "All threads that are left wait for what no thread will do"),
    "endless": ("", "No CTA has ended within the time limit; PTX has no such limit"),
    "barrier": ("barrier, barrier.cluster", "The threads of a barrier do not agree on who comes to it, or how often"),
    "mbarrier-phase": (
        "Contents of the mbarrier object; Lifecycle of the mbarrier object",
        "An mbarrier gets more than its phase takes, is used before its init, or may count in another phase",
    ),
    "wgmma-registers": (
        "wgmma.wait_group",
        "An instruction touches a register of a wgmma before a wgmma.wait_group has waited for this wgmma",
    ),
    "early-exit": (
        "Shared State Space",
        "A CTA ends while another CTA or a copy may still use the shared memory of the CTA that ends",
    ),
    "output-not-written": ("", "A tensor of torch.empty is read or returned, and nobody wrote some of its elements"),
    "nondeterministic-sum": (
        "atom",
        "Atomics of several warps or CTAs add floats to one address, and the order decides the rounding",
    ),
    "dependent-launch": (
        "griddepcontrol",
        "A dependent launch uses memory of the launch before it, and has not run griddepcontrol.wait",
    ),
    "stream-order": ("", "Two streams use the same memory, one writes it, and no event and no wait orders them"),
    "invalid-use": ("the instruction's own", "An operand or a group of threads is one that the instruction forbids"),
    "trap": ("trap", "The kernel stops itself: a trap, or an assertion that failed on the device"),
}
"""By rule: the section of the PTX ISA that states the rule, and a sentence that says what the kernel did."""


@dataclass(frozen=True)
class Finding:
    """Describes a fault of a kernel: the broken rule, and the instructions that broke it."""

    rule: Rule
    severity: Literal["error", "note"]
    """`error`: a GPU may compute another result, or the kernel cannot go on.  `note`: ptxas repairs the fault, only the
    last bits of the result are undefined, or nobody wrote an element that is read or returned, but may be unused."""
    kernel: str
    text: str
    """A sentence that names the source lines."""
    file: str = ""
    line: int = 0
    """The source line of the instruction; 0 if it is not known.  For a line of an inlined function: its call."""
    instruction: str = ""
    """The opcode with its modifiers."""
    other_file: str = ""
    other_line: int = 0
    other_instruction: str = ""
    """The instruction that came before, if the fault is about two instructions."""
    missing: str = ""
    """The fence or the `bar.warp.sync` that is missing, if one is."""
    belongs: str = ""
    """The place where the missing fence belongs: `after mine.py:7 (st.shared.b32)`."""
    grid: SizeTriple | None = None
    config: str = ""
    """The config of a tunable kernel, if the user gave it on the command line."""
    command: str = ""
    """The command that shows the fault again, if a command found it."""

    @classmethod
    def at(
        cls,
        rule: Rule,
        kernel: str,
        text: str,
        instruction: Instruction,
        other: Instruction | None = None,
        severity: Literal["error", "note"] = "error",
        **more: Any,
    ) -> Finding:
        """Makes a finding about `instruction`, and about an earlier instruction `other`.  `more` are other fields."""
        file, line = instruction.source_line
        if other is not None:
            more["other_file"], more["other_line"] = other.source_line
            more["other_instruction"] = other.opcode
        return cls(rule, severity, kernel, text, file, line, instruction.opcode, **more)

    def __str__(self) -> str:
        return demangled(f"{self.severity} [{self.rule}]: {self.kernel}: {self.text}")

    def to_dict(self) -> dict[str, Any]:
        """Returns the fields as JSON values, and the section of the PTX ISA with the meaning of the rule's name."""
        section, meaning = RULES[self.rule]
        return asdict(self) | {"section": section, "meaning": meaning}
