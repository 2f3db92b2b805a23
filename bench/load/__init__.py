"""Sends load to any server with OpenAI's protocol.  Requests are sent at given times, and each received piece of an
answer gets a time.

`arrivals.py` makes the send times, and `data.py` makes the prompts.  `http.py` and `client.py` send the requests and
take the times.  `load_run.py` runs the load.  `answers.py` then converts the received bytes into a trace (`trace.py`).
`metrics.py`, `causes.py` (causes of long gaps), `load_record.py` and `load_pictures.py` read the trace.
`results/serving/` has the client's timing error, measured with a server that reports the time of each write.
"""
