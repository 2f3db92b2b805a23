"""Serves the engine with OpenAI's HTTP API.  HTTP runs in one process, and the engine's steps run in another process.

`wire.py` defines the messages between the two processes.  `worker.py` is the engine's process.  `client.py` connects
the server to it.  `requests.py` defines the requests, `api.py` the routes, and `answers.py` the replies.  `server.py`
starts and ends both processes.
"""
