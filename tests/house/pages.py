"""The pages of the documentation for tests: their blocks of code, their commands, and the files that they show."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
RESULTS = [ROOT / "results/README.md", *sorted((ROOT / "results").glob("*/README.md"))]
LADDERS = sorted((ROOT / "docs/ladders").glob("*.md"))
MORE = {path: path.read_text() for path in (*RESULTS, *LADDERS, ROOT / "CONTRIBUTING.md")}


def blocks(name):
    """Language and text of each code block of a page."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", (PAGES | MORE)[ROOT / name], re.DOTALL | re.MULTILINE)


def bare(line):
    """A command without the comment behind it."""
    return re.split(r"\s+#\s", line)[0].strip()


def lines(block):
    """The commands of a block, each on one line, with what stands behind them."""
    found = []
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
        if found and bare(found[-1]).count("'") % 2:  # a quoted text goes on
            found[-1] += "\n" + line
        else:
            found.append(line)
    return [line for line in found if line and not line.startswith("#")]


BLOCKS = [block for path in PAGES for block in blocks(path.relative_to(ROOT))]
PYTHON = [block for language, block in BLOCKS if language == "python"]
FILES = {name[1]: block for block in PYTHON if (name := re.match(r"# (\S+\.py)\n", block))}
LINES = [
    (path, line)
    for path in PAGES | MORE
    for language, block in blocks(path.relative_to(ROOT))
    if language == "sh"
    for line in lines(block)
]
"""Every command with its page."""
WORKFLOW = re.findall(r"- run: (.*)", next(block for language, block in BLOCKS if language == "yaml"))
COMMANDS = [*dict.fromkeys(bare(line) for line in (*(line for _, line in LINES), *WORKFLOW))]
"""Every command once."""


def words_of(command):
    """The words of a command without the variables before it."""
    words = shlex.split(command)
    while re.fullmatch(r"[A-Z_0-9]+=\S*", words[0]):
        words = words[1:]
    return words
