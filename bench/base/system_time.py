"""The system's functions of `time`, even where a program replaced those of Python's own module.

A frozen clock (freezegun in a test) or a module that patches `time.perf_counter` would make a loop that waits for a
time run for ever, or publish a tenth of a time.  So the timing code in `bench` calls a second instance of the built-in
module, which no other code can reach.  A call is as fast as one of `time`; libc's `clock_gettime` by ctypes takes
0.8 us.
"""

from importlib.machinery import BuiltinImporter
from importlib.util import module_from_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import time as time  # noqa: PLC0414  so that type checkers let others import it
else:
    time = module_from_spec(BuiltinImporter.find_spec("time"))
    BuiltinImporter.exec_module(time)
