"""Load on any server of OpenAI's protocol: sends requests at given times, and times every piece of an answer.

`arrivals.py` and `data.py` give the times and the content of requests, `http.py` and `client.py` send them and take
times, and `load_run.py` runs the load.  `answers.py` then reads the bytes into a trace (`trace.py`), the input of
`metrics.py`, `causes.py` (of long gaps), `load_record.py` and `load_pictures.py`.  `results/serving/` has the client's
error, measured with a server that reports when it wrote.
"""
