"""Sends requests to any server with OpenAI's protocol, and stores when each piece of an answer arrives.

`data.py` makes the prompts.  `http.py` and `client.py` send the requests, and
`load_run.py` runs the load.  `answers.py` converts the received bytes into a trace (`trace.py`).  `metrics.py`,
`causes.py` (causes of long gaps), `load_record.py` and `load_pictures.py` read it.

`results/serving/` has the timing error of this client.
"""
