"""Load on any server of OpenAI's protocol: requests sent at their times, and the time of every piece of an answer.

`http.py` and `client.py` send and take the times; `arrivals.py` and `data.py` say when and what, and `run.py` does it.
`answers.py` reads the bytes afterwards into a trace (`trace.py`), from which `metrics.py`, `definitions.py` (metrics
of other tools), `causes.py` (of long gaps), `results.py` and `figures.py` work.  `stub.py` is a server that says when
it wrote, and `accuracy.py` measures the client against it.  `tap.py` traces another client, and `step_cost.py` measures
what HTTP costs a step of our engine.
"""
