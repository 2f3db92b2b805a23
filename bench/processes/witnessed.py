"""A command that a kernel cannot end as a success.

A kernel may call `os._exit(0)`, or register that call for the end of its process, and so end a command with status 0
before its verdict.  Therefore the command runs in a child, which writes its status to a pipe at its regular end; this
process returns what was written.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FrameType
from typing import NoReturn

PIPE = "ROOFLAB_VERDICT_PIPE"
"""The variable that tells a child the descriptor to which it writes."""
NO_VERDICT = 11
"""The exit status where the child ended without one: that of a wrong kernel."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)


def witness(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs `command`, which ends in `with_verdict`; returns the exit status that it wrote.

    Without one it returns 11 and says so, or 128 + n where the user's own signal n ended the child.
    """
    ours, theirs = os.pipe()
    child = subprocess.Popen(command, env={**environment, PIPE: str(theirs)}, pass_fds=(theirs,))
    os.close(theirs)

    def pass_on(number: int, frame: FrameType | None) -> None:
        child.send_signal(number)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to the child too, which ends and says why
    for number in _PASSED_ON:
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, pass_on)
    status = child.wait()
    os.set_blocking(ours, False)  # a process that a kernel left behind may hold the other end open
    written = b""
    with suppress(BlockingIOError):
        written = os.read(ours, 16)
    if written.isdigit():
        return int(written)
    if -status in (signal.SIGINT, *_PASSED_ON):
        return 128 - status
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    print(f"rooflab: its process ended with {how} before its verdict; a kernel must have ended it", file=sys.stderr)
    return NO_VERDICT


def with_verdict(run: Callable[[], NoReturn]) -> NoReturn:
    """Calls `run`, which ends with `SystemExit`, and writes that status for `witness`, if this process has one."""
    pipe = int(os.environ.pop(PIPE, "-1"))
    if pipe < 0:
        run()
    os.set_inheritable(pipe, False)
    if sys.platform == "linux":  # so that nothing is left where the witness itself is killed
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    try:
        run()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        os.write(pipe, str(status).encode())
        raise
