"""`time` as the system has it, whoever replaced a function of Python's own module, before or after this import.

A frozen clock (freezegun in a test) or a module that patches `time.perf_counter` would let a loop that waits for a time
run for ever, or publish a tenth of a time.  So what times in `bench` calls a second instance of the built-in module,
which nobody else knows.  It costs what `time` costs: libc's `clock_gettime` by ctypes takes 0.8 us a reading.
"""

from importlib.machinery import BuiltinImporter
from importlib.util import module_from_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import time as time
else:
    time = module_from_spec(BuiltinImporter.find_spec("time"))
    BuiltinImporter.exec_module(time)
