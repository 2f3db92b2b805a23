"""Tokens of llama.cpp's public vocabularies beside ours; writes `vocabularies.md` here.

    python results/vocabularies.py

The files (`ggml-vocab-*.gguf` with 47 texts and their tokens, which Hugging Face's tokenizers made) lie in the source
distribution of llama-cpp-python, which pip downloads: 76 MB.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from rooflab.bench.base.plain import markdown_table
from rooflab.engine.load.gguf_tokenizer import gguf_tokenizer
from rooflab.kernels._files import write_whole

SOURCE = "llama-cpp-python==0.3.36"
VOCABULARIES = (
    "llama-bpe", "llama-spm", "phi-3", "qwen2", "deepseek-llm", "deepseek-coder", "gpt-2", "starcoder", "refact",
    "command-r", "mpt",
)  # fmt: skip
BETWEEN = "\n__ggml_vocab_test__\n"


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="with the .gguf, .inp and .out files")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or fetched(Path(scratch))
        rows = [row(folder / f"ggml-vocab-{name}.gguf", name) for name in VOCABULARIES]
    lines = [
        "# Tokens of public vocabularies",
        "",
        f"`python results/vocabularies.py`: files and tokens of the source distribution of {SOURCE}.",
        "",
        *markdown_table(("vocabulary", "tokens:", "texts:", "equal:", "seconds to load:"), rows),
    ]
    write_whole(Path(__file__).with_suffix(".md"), "\n".join(lines) + "\n")


def fetched(scratch: Path) -> Path:
    """The folder with the files."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", "--dest"]
    subprocess.run([*command, str(scratch), SOURCE], check=True)
    with tarfile.open(next(scratch.glob("*.tar.gz"))) as archive:
        archive.extractall(scratch, [one for one in archive if "/ggml-vocab-" in one.name], filter="data")
    return next(scratch.rglob("ggml-vocab-llama-bpe.gguf")).parent


def row(path: Path, name: str) -> tuple[object, ...]:
    """One vocabulary's row; what differs goes to standard output."""
    began = time.perf_counter()
    tokenizer = gguf_tokenizer(path)
    seconds = time.perf_counter() - began
    texts = path.with_name(f"{path.name}.inp").read_bytes().decode().split(BETWEEN)
    wanted = [list(map(int, line.split())) for line in path.with_name(f"{path.name}.out").read_text().split("\n")]
    found = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    for text, own, right in zip(texts, found, wanted, strict=True):
        if own != right:
            print(f"{name}: {text!r}: {own}, expected {right}")
    equal = sum(own == right for own, right in zip(found, wanted, strict=True))
    return name, f"{len(tokenizer):,}", len(texts), equal, f"{seconds:.1f}"


if __name__ == "__main__":
    main()
