"""Serves the engine with OpenAI's HTTP API.  HTTP runs in one process, and the engine runs in another process.

`api.py` defines the routes, `requests.py` the requests, and `answers.py` the replies.  `worker.py` is the engine's
process.  `client.py` talks to it with the messages of `wire.py`.  `server.py` starts both processes.
"""
