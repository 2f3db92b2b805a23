"""Load on any server of OpenAI's protocol: requests sent at their times, and the time of every piece of an answer.

`http.py` and `client.py` send and take the times; `arrivals.py` and `data.py` say when and what, and `run.py` does it.
`answers.py` reads the bytes afterwards into a trace (`trace.py`), from which `metrics.py`, `definitions.py` (metrics
of other tools), `causes.py` (of long gaps), `results.py` and `figures.py` work.  `tap.py` traces another client.
`results/serving/` has the client's error against a server that says when it wrote.
"""
