"""Where `Record` (`records.record`), `read` and `read_all` (`records.files`) were before `rooflab.bench.core`."""

import sys

from rooflab.bench.core import record, record_files

sys.modules |= {f"{__name__}.record": record, f"{__name__}.files": record_files}
