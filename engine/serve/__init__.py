"""An OpenAI server in front of the engine.  HTTP runs in one process, and the engine's steps run in another.

`wire.py` defines the messages between both processes.  `worker.py` is the engine's process, and `client.py` is the
server's side.  `requests.py` defines the requests, `api.py` the routes, `answers.py` the replies.  `server.py` starts
and ends everything."""
