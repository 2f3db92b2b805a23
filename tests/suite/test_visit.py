"""A visit to a card ends in time and leaves its results, whatever its steps and its kernels do."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from pathlib import Path

import pytest
from test_child_processes import assert_gone

VISIT = Path(__file__).parents[2] / "results" / "visit"


DRIVER = """
import sys
sys.path.insert(0, {visit!r})
import visit
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
visit.LAST_S, visit.PACK_S = 1.0, 0.1
steps = (
    visit.Step("fine", 30, (sys.executable, "-c", "open('{{out}}/fine.json', 'w').write('1')")),
    visit.Step("absent", 30, ("no-such-command",)),
    visit.Step("hangs", 1, (sys.executable, "-c", stubborn)),
    visit.Step("long", 600, ("sh", "-c", "sleep 600 & echo $! > {{out}}/pid; wait")),
    visit.Step("late", 30, ("true",)),
)
visit.VISITS = {{"first": [step for step in steps if step.name in {names!r}]}}
sys.argv = ["visit.py", "first", "--limit", {limit!r}]
visit.main()
"""


def visiting(tmp_path: Path, limit: str, *names: str) -> subprocess.Popen[str]:
    """The driver, with these steps."""
    environment = {**os.environ, "OUT": str(tmp_path), "VISIT_PLACE": str(tmp_path / "place")}
    code = DRIVER.format(visit=str(VISIT), limit=limit, names=names)
    return subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)


def whole(archive: Path) -> set[str]:
    """The names in an archive, all of which was read."""
    with tarfile.open(archive) as file:
        return {member.name for member in file if not member.isfile() or file.extractfile(member).read() is not None}


@pytest.mark.more
def test_each_step_has_its_time_and_the_archive_all(tmp_path):
    began = time.monotonic()
    with visiting(tmp_path, "8", "fine", "absent", "hangs", "long", "late") as process:
        told, _ = process.communicate(timeout=60)
    assert time.monotonic() - began < 20
    how = {line.split("s  ")[1].split(": ")[0]: line.split(": ")[1] for line in told.splitlines()[1:]}
    assert how["fine"] == "exit status 0" and how["absent"].startswith("did not start")
    assert how["hangs"] == "ended after 1 s" and how["late"] == "no time was left"
    assert {f"visit/{name}" for name in ("fine.json", "hangs.txt", "long.txt", "first.log")} <= whole(
        tmp_path / "visit.tgz"
    )
    assert_gone(int((tmp_path / "place" / "visit" / "pid").read_text()))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ended_at_any_second_it_leaves_a_whole_archive(tmp_path, number):
    """The second is drawn; what was there some time before is in the archive."""
    pid = tmp_path / "place" / "visit" / "pid"
    with visiting(tmp_path, "600", "fine", "long") as process:
        while not (pid.exists() and pid.read_text()):
            time.sleep(0.1)
        time.sleep(1.0 + random.random())
        process.send_signal(number)
        process.wait(20)
        with suppress(ProcessLookupError):  # a killed driver ends no step
            os.killpg(os.getpgid(int(pid.read_text())), signal.SIGKILL)
    assert "visit/fine.json" in whole(tmp_path / "visit.tgz")
