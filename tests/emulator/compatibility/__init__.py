"""Other projects' kernels in the emulator: the sources, the call of each kernel, and the page of results.

`sources.py` fetches them, `entries.py` says what an entry is, the file of each project lists its entries, `worker.py`
runs one, `page.py` runs them all.
"""
