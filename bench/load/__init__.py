"""Sends requests to any server with OpenAI's protocol, at given times.  Stores when each piece of an answer arrives.

`arrivals.py` makes the send times, and `data.py` makes the prompts.  `http.py` and `client.py` send the requests.
`load_run.py` runs the load.  Then `answers.py` converts the received bytes into a trace (`trace.py`), which has the
times of all requests and tokens.  `metrics.py`, `causes.py` (causes of long gaps), `load_record.py` and
`load_pictures.py` read the trace.  `results/serving/` has the timing error of this client, measured with a server that
reports the time of each write.
"""
