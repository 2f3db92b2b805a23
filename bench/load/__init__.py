"""Load on any server of OpenAI's protocol: requests sent at their times, and the time of every piece of an answer.

`http.py` and `client.py` send and take the times, `stub.py` is a server that says when it wrote, and `accuracy.py`
measures the client against it.
"""
