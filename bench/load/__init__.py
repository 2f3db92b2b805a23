"""Load on any server of OpenAI's protocol: sends requests at given times, and times every piece of an answer.

`http.py` and `client.py` send requests and take times; `arrivals.py` and `data.py` give times and content of requests,
and `run.py` runs the load.  `answers.py` then reads the bytes into a trace (`trace.py`), from which `metrics.py`,
`definitions.py` (metrics of other tools), `causes.py` (of long gaps), `results.py` and `figures.py` work.  `tap.py`
traces another client.  `results/serving/` has the client's error, measured with a server that reports when it wrote.
"""
