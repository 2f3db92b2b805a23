"""Splits a PTX text into functions and statements, and reads their operands and declarations.

A statement of a function's body is a brace that opens or closes a scope, a label, a directive or an instruction.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rooflab.bench.emulator.text import syntax

_COMMENT_PATTERN = re.compile(r'("[^"\n]*")|//[^\n]*|/\*.*?\*/', re.DOTALL)
"""A comment or a string; a `//` in a string does not begin a comment."""
_INLINED_LOC_PATTERN = re.compile(r"(\.loc[^\n/]*)//[^\n]*@\[\s*([^\s:\]]+):(\d+):\d+[\s\]]*$", re.MULTILINE)
"""Finds the outermost inlined call, which LLVM names last in the comment after a `.loc`."""
_INLINE_ASM_PATTERN = re.compile(r"// begin inline asm.*?// end inline asm", re.DOTALL)
_ASM_LINE_PATTERN = re.compile(r"\.loc\b[^\n]*")
"""LLVM 23 (Triton 3.8) counts lines of inline assembly up from the call's line.  Only the call's own line is real."""
_WHITESPACE_PATTERN = re.compile(r"\s+")
_LABEL_PATTERN = re.compile(r"([\w$%]+)\s*:(?!:)\s*")
_LINE_DIRECTIVE_PATTERN = re.compile(r"\.(?:loc|file|version|target|address_size)\b[^\n]*")
_STATEMENT_PATTERN = re.compile(r'(?:[^;"]|"(?:[^"\\]|\\.)*")*?;')
_ENTRY_PATTERN = re.compile(r"\.(?:entry|func)\b")
_NAME_PATTERN = re.compile(r"[\w$.%]+")
NameResolver = Callable[[str], syntax.Operand]
"""Returns the operand that a name means in the current scope."""
_NUMBER_PATTERN = re.compile(r"[-+]?(?:0[xX][0-9a-fA-F]+|0[bB][01]+|0[0-7]*|[1-9]\d*)U?$")
_FLOAT_BITS_PATTERN = re.compile(r"0([fFdD])([0-9a-fA-F]+)$")
_DECIMAL_FLOAT_PATTERN = re.compile(r"[-+]?(?:\d+\.\d*|\.\d+|\d+(?=[eE]))(?:[eE][-+]?\d+)?$")
_SYMBOL_OFFSET_PATTERN = re.compile(r"([A-Za-z_$%][\w$]*)\s*([+-]\s*\w+)$")
SPECIAL_REGISTERS = re.compile(
    r"%(?:(?:tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)(?:\.[xyz])?|laneid|warpid|nwarpid"
    r"|smid|nsmid|gridid|is_explicit_cluster|cluster_ctarank|cluster_nctarank|lanemask_(?:eq|le|lt|ge|gt)|clock(?:_hi|64)?"
    r"|globaltimer(?:_lo|_hi)?|dynamic_smem_size|total_smem_size|aggr_smem_size|envreg\d+|pm\d+)$"
)
_VARIABLE_PATTERN = re.compile(
    r"(?:\.(?:visible|extern|weak|common)\s+)*\.(shared|global|const|local|param)\b(?:::\w+)?\s*(.*)$", re.DOTALL
)
_ATTRIBUTE_PATTERN = re.compile(r"\.attribute\s*\([^)]*\)")
_REGISTERS_PATTERN = re.compile(r"\.reg\s*\.(\w+)\s+(.*)$", re.DOTALL)
_REFERENCE_PATTERN = re.compile(
    r"(?:0[xX]([0-9a-fA-F]+)\()?(?:generic\(([A-Za-z_$%][\w$]*)\)|([A-Za-z_$%][\w$]*))\s*([+-]\s*\d+)?\)?$"
)
_REGISTER_RANGE_PATTERN = re.compile(r"([\w$%]+)<(\d+)>$")


class Function(NamedTuple):
    """Holds a `.entry` or `.func`: the text before its body, and its body without the braces."""

    is_entry: bool
    name: str
    returns: str
    parameters: str
    directives: str
    body: str


def strip_comments(text: str) -> str:
    """Returns the text without comments.  Line ends are kept, because a line end also ends a `.loc`.

    If a comment after a `.loc` names inlined calls, the outermost call is kept, as `.loc 2 43 17 called name line`."""
    text = _INLINE_ASM_PATTERN.sub(lambda block: _ASM_LINE_PATTERN.sub("", block[0]), text)
    return _COMMENT_PATTERN.sub(lambda match: match[1] or " ", _INLINED_LOC_PATTERN.sub(r"\1 called \2 \3", text))


def statements(body: str) -> Iterator[tuple[str, str]]:
    """Yields the kind and the text, without `;`, of each statement of a body.  The kind is `open`, `close`, `label`,
    `line` (`.loc`, `.file`) or `text`."""
    index, body_length = 0, len(body)
    while index < body_length:
        if token_match := _WHITESPACE_PATTERN.match(body, index):
            index = token_match.end()
            continue
        character = body[index]
        if character in "{}":
            yield ("open" if character == "{" else "close", "")
            index += 1
        elif character == ";":
            index += 1
        elif token_match := _LINE_DIRECTIVE_PATTERN.match(body, index):
            yield ("line", token_match[0])
            index = token_match.end()
        elif token_match := _LABEL_PATTERN.match(body, index):
            yield ("label", token_match[1])
            index = token_match.end()
        elif token_match := _STATEMENT_PATTERN.match(body, index):
            yield ("text", token_match[0][:-1].strip())
            index = token_match.end()
        else:
            raise syntax.PtxError(f"PTX: expected a statement that ends with ';', got {body[index : index + 60]!r}")


def split_module(text: str) -> tuple[list[str], list[Function]]:
    """Returns the module's own directives and declarations, and its functions.  `text` must have no comments."""
    module_texts: list[str] = []
    functions: list[Function] = []
    text_index = 0
    while header_match := _ENTRY_PATTERN.search(text, text_index):
        header_start = max(text.rfind(statement_end, text_index, header_match.start()) for statement_end in ";}\n") + 1
        module_texts.append(text[text_index : max(header_start, text_index)])
        module_function, text_index = _function(text, header_match)
        if module_function is not None:
            functions.append(module_function)
    remaining_text = text[text_index:]
    # Sections of debug information follow the code.
    module_texts.append(re.split(r"(?m)^\s*\.section\b", remaining_text)[0])
    return module_texts, functions


def _function(text: str, head: re.Match[str]) -> tuple[Function | None, int]:
    index = _skip(text, head.end())
    returns = ""
    if text[index] == "(":
        close = _closing(text, index, "()")
        returns, index = text[index + 1 : close], _skip(text, close + 1)
    name = _NAME_PATTERN.match(text, index)
    if name is None:
        raise syntax.PtxError(f"PTX: expected the name of a function, got {text[index : index + 40]!r}")
    index = _skip(text, name.end())
    parameters = ""
    if text[index] == "(":
        close = _closing(text, index, "()")
        parameters, index = text[index + 1 : close], close + 1
    opening, end_index = text.find("{", index), text.find(";", index)
    if opening < 0 or 0 <= end_index < opening:
        return None, end_index + 1  # a declaration has no body
    close = _closing(text, opening, "{}")
    is_entry = head[0] == ".entry"
    return (Function(is_entry, name[0], returns, parameters, text[index:opening], text[opening + 1 : close]), close + 1)


def _skip(text: str, place: int) -> int:
    whitespace_match = _WHITESPACE_PATTERN.match(text, place)
    return whitespace_match.end() if whitespace_match else place


def _closing(text: str, place: int, pair: str) -> int:
    nesting_depth = 0
    for bracket_match in re.compile(f"[{re.escape(pair)}]").finditer(text, place):
        nesting_depth += 1 if bracket_match[0] == pair[0] else -1
        if not nesting_depth:
            return bracket_match.start()
    raise syntax.PtxError(f"PTX: expected {pair[1]!r} for the {pair[0]!r} of {text[place : place + 40]!r}")


def split(text: str) -> list[str]:
    """Splits a list of operands at the commas that are outside all brackets."""
    operand_texts, bracket_depth, start = [], 0, 0
    for text_index, character in enumerate(text):
        if character in "{[(":
            bracket_depth += 1
        elif character in "}])":
            bracket_depth -= 1
        elif character == "," and not bracket_depth:
            operand_texts.append(text[start:text_index].strip())
            start = text_index + 1
    operand_texts.append(text[start:].strip())
    return [operand_text for operand_text in operand_texts if operand_text]


def number(text: str) -> int:
    """Reads an integer constant.  Raises `PtxError` on any other text."""
    if not _NUMBER_PATTERN.match(text):
        raise syntax.PtxError(f"PTX: expected an integer constant, got {text!r}")
    number_text = text.rstrip("U")
    # A leading zero means octal in PTX, as in C.
    if re.match(r"[-+]?0\d", number_text):
        return int(number_text, 8)
    return int(number_text, 0)


def parse_operand(text: str, resolve: NameResolver) -> syntax.Operand:
    """Reads an operand and resolves its names.  Raises `PtxError` on a text that is not an operand."""
    if text.startswith("["):
        return _address(text[1:-1].strip(), resolve)
    if text.startswith(("{", "(")):
        return syntax.OperandGroup(tuple(parse_operand(item_text, resolve) for item_text in split(text[1:-1])))
    if "|" in text:
        return syntax.OperandGroup(tuple(parse_operand(item_text.strip(), resolve) for item_text in text.split("|")))
    if text == "_":
        return syntax.Sink()
    if text.startswith("!"):
        register = resolve(text[1:].strip())
        if not isinstance(register, syntax.Register):
            raise syntax.PtxError(f"PTX: expected a predicate after '!', got {text!r}")
        return syntax.Negated(register)
    if offset_match := _SYMBOL_OFFSET_PATTERN.match(text):
        base_symbol = resolve(offset_match[1])
        if not isinstance(base_symbol, syntax.Symbol):
            raise syntax.PtxError(f"PTX: expected a variable's address, got {text!r}")
        return base_symbol._replace(offset=number(offset_match[2].replace(" ", "")))
    return _constant(text) or resolve(text)


def _constant(text: str) -> syntax.Immediate | None:
    if _NUMBER_PATTERN.match(text):
        return syntax.Immediate(number(text))
    if float_match := _FLOAT_BITS_PATTERN.match(text):
        return syntax.Immediate(int(float_match[2], 16), 32 if float_match[1] in "fF" else 64)
    if _DECIMAL_FLOAT_PATTERN.match(text):
        return syntax.Immediate(struct.unpack("<Q", struct.pack("<d", float(text)))[0], 64)
    return None


def _address(text: str, resolve: NameResolver) -> syntax.Address:
    address_parts = split(text)
    coordinates: tuple[syntax.Operand, ...] = ()
    for coordinate_text in address_parts[1:]:
        coordinate = parse_operand(coordinate_text, resolve)
        coordinates += coordinate.items if isinstance(coordinate, syntax.OperandGroup) else (coordinate,)
    base_text, byte_offset = address_parts[0], 0
    if offset_match := re.match(r"(.+?)\s*([+-])\s*(-?\w+)$", base_text):
        base_text, byte_offset = offset_match[1], number(offset_match[3]) * (-1 if offset_match[2] == "-" else 1)
    operand = _constant(base_text) or resolve(base_text)
    if not isinstance(operand, syntax.Register | syntax.Symbol | syntax.Immediate):
        raise syntax.PtxError(f"PTX: expected an address in [], got [{text}]")
    return syntax.Address(operand, byte_offset, coordinates)


def declared_registers(text: str) -> tuple[str, list[tuple[str, int | None]]] | None:
    """Returns the type and the names in a `.reg` declaration.  The name `%r<10>` stands for 10 registers."""
    declaration_match = _REGISTERS_PATTERN.match(text)
    if declaration_match is None:
        return None
    if declaration_match[1] not in syntax.TYPE_WIDTHS:
        raise syntax.PtxError(f"PTX: expected a register of a known type, got {text!r}")
    names_and_counts: list[tuple[str, int | None]] = []
    for register_item in split(declaration_match[2]):
        range_match = _REGISTER_RANGE_PATTERN.match(register_item)
        names_and_counts.append((range_match[1], int(range_match[2])) if range_match else (register_item, None))
    return declaration_match[1], names_and_counts


def declared_variable(text: str) -> syntax.Variable | None:
    """Returns the variable that a statement declares, or None.  Raises `PtxError` on an unknown type."""
    declaration_match = _VARIABLE_PATTERN.match(text)
    if declaration_match is None:
        return None
    space, declaration_text = declaration_match[1], _ATTRIBUTE_PATTERN.sub("", declaration_match[2])
    declarator, _, initial_text = declaration_text.partition("=")
    align_match = re.search(r"\.align\s+(\d+)", declarator)
    kind = re.search(r"\.([busf]\d+)\b", declarator)
    name = re.search(r"([\w$%]+)\s*((?:\[\s*\d*\s*\]\s*)*)$", declarator.strip())
    if kind is None or name is None or kind[1] not in syntax.TYPE_WIDTHS:
        raise syntax.PtxError(f"PTX: expected a variable of a known type, got {text!r}")
    element_bytes = syntax.TYPE_WIDTHS[kind[1]]
    array_sizes = [int(length or 0) for length in re.findall(r"\[\s*(\d*)\s*\]", name[2])]
    vector_match = re.search(r"\.v([248])\b", declarator)
    if vector_match is not None:
        array_sizes.append(int(vector_match[1]))
    references: list[syntax.Reference] = []
    initial_bytes = (
        _initial(initial_text.strip(), kind[1], element_bytes, references, array_sizes) if initial_text.strip() else b""
    )
    length = max(element_bytes * math.prod(array_sizes), len(initial_bytes))
    natural_align = element_bytes * int(vector_match[1]) if vector_match else element_bytes
    return syntax.Variable(
        name[1], space, length, int(align_match[1]) if align_match else natural_align, initial_bytes, tuple(references)
    )


def _initial(
    text: str, kind: str, width: int, references: list[syntax.Reference], sizes: list[int], start: int = 0
) -> bytes:
    """Converts `text`, the initial value of a PTX variable, to bytes.  If the text contains an address, the bytes of
    the address are 0, and `references` gets a `Reference` to it.  `start` is the offset of the bytes in the
    variable."""
    value_texts = split(text[1:-1]) if text.startswith("{") else [text]
    initial_bytes = b""
    for value_text in value_texts:
        if value_text.startswith("{"):
            value_bytes = _initial(value_text, kind, width, references, sizes[1:], start + len(initial_bytes))
            initial_bytes += value_bytes.ljust(width * math.prod(sizes[1:]), b"\0")
        elif ref_match := _REFERENCE_PATTERN.match(value_text):
            mask_text, symbol, ref_offset = ref_match[1], ref_match[2] or ref_match[3], ref_match[4] or "0"
            mask_bits = int(mask_text, 16) if mask_text else (1 << 64) - 1
            references.append(
                syntax.Reference(start + len(initial_bytes), width, symbol, int(ref_offset.replace(" ", "")), mask_bits)
            )
            initial_bytes += bytes(width)
        elif width >= 4 and (kind.startswith("f") or _FLOAT_BITS_PATTERN.match(value_text)):
            initial_bytes += struct.pack("<f" if width == 4 else "<d", _float(value_text))
        else:
            initial_bytes += (number(value_text) % (1 << 8 * width)).to_bytes(width, "little")
    return initial_bytes


def _float(text: str) -> float:
    match = _FLOAT_BITS_PATTERN.match(text)
    if match is None:
        return float(text)
    is_f32 = match[1] in "fF"
    value: float = struct.unpack("<f" if is_f32 else "<d", int(match[2], 16).to_bytes(4 if is_f32 else 8, "little"))[0]
    return value


def declared_parameters(text: str) -> list[syntax.Parameter]:
    """Returns the parameters of a kernel, in their order."""
    parameters = []
    for parameter_text in split(text):
        variable = declared_variable(parameter_text.replace(".ptr", ""))
        if variable is None:
            raise syntax.PtxError(f"PTX: expected a parameter, got {parameter_text!r}")
        kind = re.search(r"\.([busf]\d+)\b", parameter_text)
        assert kind is not None
        is_array = "[" in parameter_text
        # `.ptr .align` is the alignment of the memory behind the pointer, not of the parameter.
        alignment = max(syntax.TYPE_WIDTHS[kind[1]], variable.align) if is_array else syntax.TYPE_WIDTHS[kind[1]]
        parameters.append(syntax.Parameter(variable.name, "bytes" if is_array else kind[1], variable.size, alignment))
    return parameters
