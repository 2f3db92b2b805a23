"""An OpenAI server in front of the engine: HTTP in one process, the steps in another.

`wire.py` is what the two say to each other, `worker.py` the engine's process, `client.py` its other end; `requests.py`
is what a user may ask, `api.py` the routes, `answers.py` the replies, `server.py` starts and ends it all.
"""
