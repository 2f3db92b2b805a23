"""Load on any server of OpenAI's protocol: sends requests at given times, and times every piece of an answer.

`http.py` and `client.py` send requests and take times; `arrivals.py` and `data.py` give times and content of requests,
and `load_run.py` runs the load.  `answers.py` then reads the bytes into a trace (`trace.py`), from which `metrics.py`,
`causes.py` (of long gaps), `load_record.py` and `load_pictures.py` work.  `results/serving/` has the error of the
client, measured with a server that reports when it wrote.
"""
