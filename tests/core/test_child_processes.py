"""Child processes: the answers of a child, and the end of a child that hangs, dies or leaves other processes behind."""

import subprocess
import sys
import time
from unittest.mock import patch

import psutil
import pytest

from rooflab.bench.core import process as child
from rooflab.bench.core.process import Child, ChildFailed, Pool

START = """
import json, os, subprocess, sys, time
def say(value):
    print(json.dumps(value), flush=True)
"""
READY = START + "print('ready', flush=True)\nrequest = json.loads(sys.stdin.readline())\n"
# As profilers do it: the program that runs the kernel is a child, and may lead a session.  It holds the output open.
LEAVES = """
left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=AWAY)
say(left.pid)
"""
FORKS, PARTS = LEAVES.replace("AWAY", "False"), LEAVES.replace("AWAY", "True")
ANSWERS = """
import os, sys
print("what an import prints is no answer")
def answer(request):
    print("nor is what a kernel prints")
    if request == "several":
        return iter(["one", "two"])
    return {"request": request, "pid": os.getpid()}
"""


def script(text, **options):
    with patch.object(child, "command_for", lambda *of: [sys.executable, "-c", text]):
        return Child(**options)


def assert_gone(pid):
    """Within ten seconds of the call; a zombie is gone."""
    ends = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie":
        assert time.monotonic() < ends, "it outlived its parent"
        time.sleep(0.02)


def test_a_child_that_leaves_another_behind_is_ended_with_it():
    for leaves in (FORKS, PARTS):
        with script(READY + leaves + "say(None)\ntime.sleep(600)") as asked:
            (left,) = asked.stream(None, 60.0)
        assert_gone(left)


def test_one_that_hangs_is_ended_in_time_with_what_it_has_started():
    with script(READY + PARTS + "time.sleep(600)") as asked:
        answers = asked.stream(None, 60.0)
        left = next(answers)
        with pytest.raises(ChildFailed, match="^took longer than 1 s, and was ended$"):
            asked.ask(None, 1.0)
        assert_gone(left)


def test_one_that_died_is_known_by_its_status_though_a_child_holds_its_output():
    with script(READY + FORKS + "os._exit(7)") as asked, pytest.raises(ChildFailed) as died:
        list(asked.stream(None, 1.0))
    assert died.value.status == 7 and str(died.value) == "its process ended with status 7: it said nothing"


def test_a_signal_is_named_and_the_log_holds_what_was_said(tmp_path):
    (tmp_path / "log").write_text("earlier\n")
    words = "sys.stderr.write('last words')\nsys.stderr.flush()\nprint('{\"key\": \"gem', end='', flush=True)\n"
    with script(READY + words + "os.abort()", log=tmp_path / "log") as aborts, pytest.raises(ChildFailed) as died:
        aborts.ask(None, 60.0)  # whose answer is cut short
    assert (died.value.how, died.value.words) == ("signal SIGABRT", "last words")
    assert (tmp_path / "log").read_text() == "earlier\nlast words"


def test_a_module_answers_and_nothing_that_is_printed_is_an_answer(tmp_path):
    (tmp_path / "answers.py").write_text(ANSWERS)
    environment = {"PYTHONPATH": str(tmp_path)}
    with Child("json", "answers", environment=environment) as asked:
        assert list(asked.stream("several", 60.0)) == ["one", "two"]
        assert asked.ask({"x": 1}, 60.0)["request"] == {"x": 1}
    pool = Pool("answers", environment=environment, limit_s=60.0)
    assert [found["request"] for found in pool.ask_all(range(5))] == list(range(5))
    first = pool.ask("which")["pid"]
    assert pool.ask("which")["pid"] == first, "a child is kept for the next request"
    pool.stop()
    assert_gone(first)


def test_a_pool_has_a_child_for_the_next_request_where_one_died(tmp_path):
    (tmp_path / "dies.py").write_text("import os\ndef answer(request):\n    return request or os._exit(7)\n")
    pool = Pool("dies", environment={"PYTHONPATH": str(tmp_path)}, limit_s=60.0)
    one, failed, three = pool.ask_all([1, 0, 3])
    assert (one, three) == (1, 3) and failed.status == 7
    pool.stop()


def test_a_program_that_holds_the_pipes_is_ended_too(tmp_path):
    text = START + PARTS.replace("say(left.pid)", "open(sys.argv[1], 'w').write(str(left.pid))") + "left.wait()"
    with pytest.raises(subprocess.TimeoutExpired):
        Child.run([sys.executable, "-c", text, str(tmp_path / "pid")], 1.5, {})
    assert_gone(int((tmp_path / "pid").read_text()))
