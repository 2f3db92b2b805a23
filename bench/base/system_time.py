"""Holds the original functions of the module `time`, even if a program has replaced them.

With a frozen clock (freezegun in a test), a loop that waits for a time would never end.  A patched `time.perf_counter`
could report a tenth of the real time.  So `bench` uses a second instance of the built-in module.  Its calls are as fast
as calls of `time`.  libc's `clock_gettime` through ctypes would take 0.8 us per call.
"""

from importlib.machinery import BuiltinImporter
from importlib.util import module_from_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import time as time  # noqa: PLC0414  so that type checkers let others import it
else:
    time = module_from_spec(BuiltinImporter.find_spec("time"))
    BuiltinImporter.exec_module(time)
