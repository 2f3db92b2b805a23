"""Names are data: every output keeps any name, as the output's own strict parser reads it back."""

import json
import random
import re
from html import unescape
from unicodedata import category

import pytest
from junitparser import JUnitXml
from markdown_it import MarkdownIt
from test_history import record

from rooflab.bench import show
from rooflab.bench.ab import output
from rooflab.bench.ab.verdict import Outcome
from rooflab.bench.core.record import Record
from rooflab.kernels._files import write_whole
from rooflab.kernels.registry import register
from rooflab.roofline.names import visible

MARKUP = (
    r"$x^2$ $ :x: ` `` | \ \| [red] [/] <b> </script> &amp; ]]> -- _x_ * ~ ~~ ![a](b) # % = , ' é é 漢字 🚀".split()
)
CONTROLS = "\x00", "\x1b[31m", "\r", "\n", "\t", "\x85", "\u2028", "\u202e", "\ufffe", "\ud800", "\u200d", "\u3000"
PIECES = (*MARKUP, *CONTROLS, " ", '"', "naive", "test_x[1-a]")


def names(seed, count):
    """Random names of 1 to 200 characters; every fifth one holds only letters that any output can hold."""
    rng = random.Random(seed)
    for number in range(count):
        size = rng.choice((1, 2, 5, 30, 40, 200))
        pieces = ("a", "_", "9") if number % 5 == 0 else (*PIECES, *(chr(rng.randrange(1, 0x11000)) for _ in range(9)))
        yield "".join(rng.choice(pieces) for _ in range(size))[:size]


@pytest.mark.parametrize(("seed", "count"), [(0, 30), pytest.param(1, 500, marks=pytest.mark.more)])
def test_every_output_of_any_name_is_read_back_or_the_name_is_refused(capsys, tmp_path, seed, count):
    found = [name for name in names(seed, count) if name.strip()]
    for name in found:
        with show.chosen(as_json=True):
            show.result({"kernel": name})
        assert json.loads(capsys.readouterr().out) == {"kernel": name}
        if any(category(each) == "Cs" for each in name):
            with pytest.raises(ValueError, match="^kernel: expected a name that UTF-8 holds, or None, got "):
                record(1, 1.0, kernel=name)
            with pytest.raises(ValueError, match=r"^\S+a.txt: expected text that UTF-8 holds, got "):
                write_whole(tmp_path / "a.txt", name)
            continue
        made = record(1, 1.0, kernel=name, op="gemm")
        assert Record.from_json(made.to_json()).kernel == name
    outcomes = [Outcome(name, "MISSING", name) for name in found]
    output.write_junit(tmp_path / "a.xml", outcomes, strict=True)
    assert [case.name for case in next(iter(JUnitXml.fromfile(str(tmp_path / "a.xml"))))] == list(map(visible, found))
    output.write_markdown(tmp_path / "a.md", "a", outcomes, found)
    page = MarkdownIt("commonmark").enable("table").render((tmp_path / "a.md").read_text())
    cells = [unescape(re.sub("<[^>]*>", "", cell)) for cell in re.findall("<td[^>]*>(.*?)</td>", page, re.DOTALL)]
    assert len(cells) == 9 * len(found) and cells[::9] == list(map(visible, found))
    assert cells[8::9] == [visible(" ".join(name.split())) for name in found]


@pytest.mark.parametrize("name", ["", " ", "a\nb", "\x1b[31m"])
def test_a_kernel_is_not_registered_under_a_name_that_no_table_shows(name):
    with pytest.raises(ValueError, match="^name: expected a name of characters that can be seen, got "):
        register(op="rmsnorm", name=name, role="optimized", backend="torch")(lambda x, weight, eps: x)
    if not name.strip():
        with pytest.raises(ValueError, match="^kernel: expected a name that UTF-8 holds, or None, got "):
            record(1, 1.0, kernel=name)
