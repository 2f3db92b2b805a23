"""Reads the code in a cubin, which is a compiled CUDA program in an ELF file."""

from __future__ import annotations

import hashlib
import struct

CODE_SECTIONS = (".text.", ".nv.constant", ".nv.global.init", ".rodata")
"""The prefixes of the names of cubin sections with instructions and constants."""


def code_hash(cubin: bytes) -> str:
    """Returns the SHA-256 of a cubin's instructions and constants, which are ELF sections (System V ABI, "Sections").

    Raises `ValueError` if `cubin` is not a little-endian 64-bit ELF file."""
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError(f"cubin: expected a little-endian 64-bit ELF file, got {cubin[:6]!r}")
    (table_offset,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_size, num_sections, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table_offset + entry_size * index) for index in range(num_sections)]
    names_offset = headers[names_index][4]
    sections = {}
    for name_offset, kind, _, _, offset, size in headers:
        name = cubin[names_offset + name_offset : cubin.index(b"\0", names_offset + name_offset)].decode()
        sections[name] = b"" if kind == 8 else cubin[offset : offset + size]  # type 8 (NOBITS) has no bytes in the file
    code_digest = hashlib.sha256()
    for name in sorted(filter(lambda name: name.startswith(CODE_SECTIONS), sections)):
        code_digest.update(f"{name}:{len(sections[name])}:".encode() + sections[name])
    return code_digest.hexdigest()
