"""Other projects' kernels in the emulator: where their sources come from, how each is called, and the page of results.

`sources.py` fetches them, `entries.py` says what an entry is, the file of each project lists its entries, `worker.py`
runs one, `page.py` runs them all.
"""
