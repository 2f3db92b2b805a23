"""`rooflab watch` follows a file through right, wrong and failing saves, and says one sentence for each failure."""

import json
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import needs
import pytest
from pages import FILES

from rooflab.bench.watch.watch_runs import faults_in

WAIT_S = 240.0
TORCH, TRITON = (block.partition("\n")[2] for block in (FILES["mine.py"], FILES["fast.py"]))


@dataclass
class Watching:
    """A running `rooflab watch`, and the file that it follows."""

    file: Path
    url: str

    def ask(self, path="state", host=None):
        request = urllib.request.Request(self.url + path, headers={"Host": host} if host else {})
        with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
            return reply.read().decode()

    def until(self, is_done):
        """Returns the first state for which `is_done`."""
        end = time.monotonic() + WAIT_S
        while not is_done(state := json.loads(self.ask())):
            assert time.monotonic() < end, state
            time.sleep(0.1)
        return state

    def save(self, text, is_done=lambda state: state["verdict"]):
        before = json.loads(self.ask())["save"]
        self.file.write_text(text)
        state = self.until(lambda state: state["save"] > before and is_done(state))
        assert "\n".join(state["source"]) + "\n" == text
        return state


@contextmanager
def watching(folder, text, *options):
    needs.skip_without("loopback")
    file = folder / "mine.py"
    file.write_text(text)
    command = [sys.executable, "-m", "rooflab.bench", "watch", str(file), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield Watching(file, re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())[0])
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0 and "ended" in process.stdout.read()


BODY = "    x32 = x.float()\n"
COMMON = {
    "SyntaxError": TORCH + "def (\n",
    "SIGABRT": TORCH.replace(BODY, f"{BODY}    __import__('os').abort()\n"),
    "TIMEOUT": TORCH.replace(BODY, f"{BODY}    while True: pass\n"),
}
RARE = {
    "INCORRECT": TORCH.replace(" + eps", ""),
    "took longer": TORCH + "while True: pass\n",
    "registers no kernel": "import torch\n",
    "expected --kernel": TORCH + TORCH.replace("mine", "other"),
}


@pytest.mark.more
@pytest.mark.parametrize("failures", [COMMON, pytest.param(RARE, marks=pytest.mark.slow)], ids=["common", "rare"])
def test_each_failure_is_one_sentence_and_the_next_save_recovers(failures, tmp_path):
    with watching(tmp_path, TORCH, "--limit", "3") as page:
        state = page.until(lambda state: state["measured"])
        assert (state["verdict"], state["sentence"], state["kernel"]) == ("right", "", "rmsnorm/mine")
        names = {row["kernel"] for row in state["measured"]["times"]}
        assert state["emulated"] is None and names == {"mine", "library"}
        for word, text in failures.items():
            state = page.save(text)
            assert state["verdict"] == "wrong" and word in state["sentence"], state["sentence"]
            assert word != "SyntaxError" or [*state["faults"]] == [str(text.count("\n"))]
        page.file.unlink()
        assert page.until(lambda state: "is gone" in state["sentence"])["verdict"] == "wrong"
        assert page.save(TORCH)["verdict"] == "right"
        with pytest.raises(urllib.error.HTTPError, match="403"):
            page.ask(host="elsewhere.example")


@pytest.mark.more
def test_a_triton_kernel_has_counts_by_line_and_a_fault_marks_its_line(tmp_path):
    with watching(tmp_path, TRITON) as page, urllib.request.urlopen(page.url + "events", timeout=WAIT_S) as events:
        state = page.until(lambda state: state["compiled"])
        assert state["verdict"] == "right" and state["compiled"]["registers"] > 0 and state["compiled"]["published"]
        lines = TRITON.splitlines()
        load, store = (
            next(str(n) for n, line in enumerate(lines, 1) if name in line) for name in ("row = tl", "tl.store")
        )
        assert all(state["emulated"]["lines"][line]["global_bytes"] for line in (load, store))
        low, high = state["compiled"]["predicted_ms"]
        assert state["compiled"]["bound_ms"] < high and low < high and state["last"] is None
        state = page.save(TRITON.replace("start + at, at < width, 0.0)", "start + at)"))
        assert state["verdict"] == "wrong" and "out-of-bounds" in state["faults"][load]
        assert state["last"]["save"] == 1 and state["last"]["levels"]
        seen = (json.loads(line[6:]) for line in events if line.startswith(b"data: "))
        assert next(other for other in seen if other["version"] >= state["version"])["sentence"] == state["sentence"]


def test_lines_are_found_in_what_python_triton_and_the_emulator_say():
    texts = ["a.py:7 (ld)", "invalid (a.py, line 3)", 'File "/x/a.py", line 12 in f', "ba.py:9", "a.py:7 again"]
    assert faults_in("a.py", texts) == {7: texts[0], 3: texts[1], 12: texts[2]}


def test_what_registers_no_kernel_is_refused_with_the_way_to_register_it(rooflab):
    for name in ("mine.py::softmax", "missing.py", "mine.txt"):
        status, _, err = rooflab("watch", name)
        assert status == 2 and "@register(op=" in err and repr(name) in err


@pytest.mark.more
@pytest.mark.needs("browser")
def test_two_tabs_agree_and_nothing_scrolls_sideways(tmp_path, chromium):
    with watching(tmp_path, TORCH) as page:
        tabs, heard = [chromium.new_page(viewport={"width": width, "height": 800}) for width in (360, 1440)], []
        for tab in tabs:
            tab.on("console", lambda message: heard.append(message.text))
            tab.goto(page.url)
        page.save(COMMON["SyntaxError"], lambda state: state["verdict"] and not state["running"])
        for tab in tabs:
            tab.wait_for_function("document.title.includes('wrong')")
            assert tab.locator("tr.fault").count() == 2
            assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert len({tab.locator("#save").inner_text() for tab in tabs}) == 1 and heard == []
        page.save(TORCH, lambda state: state["cells"] and state["cells"][0]["status"])
        tabs[0].locator("#grid button").first.press("Enter")
        assert "rooflab check rmsnorm" in tabs[0].locator("#cell").inner_text()
        [tab.close() for tab in tabs]
