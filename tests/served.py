"""Starts servers in their own processes: one with a tiny model of random weights, and the load generator's stub."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from needs import skip_without
from tiny_model import write_config

STUB = Path(__file__).resolve().with_name("load_stub.py")
WAIT_S = 120.0
"""Longest wait for an answer of a server, or for its end: a machine may be busy."""
START_S = 400.0
"""Longest wait for its start: two replicas of Ray took 207 s beside five other processes on two cores."""


@dataclass
class Served:
    """A running server."""

    url: str
    process: subprocess.Popen[str]

    def ask(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
        """Status and body of a reply: JSON, or text."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"content-type": "application/json", **(headers or {})})
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as reply:
                status, text = reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    @property
    def engine(self) -> psutil.Process:
        """The engine's process; waits for it."""
        while self.process.poll() is None:
            for one in psutil.Process(self.process.pid).children():
                if "--multiprocessing-fork" in one.cmdline():
                    return one
            time.sleep(0.01)
        raise AssertionError("the server has no engine")

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        text = self.ask("/metrics")[1]
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + "{"))


@contextmanager
def served(folder: Path, *options: str, key: str = "", model: str = "") -> Iterator[Served]:
    """Serves `model`, or that of `tiny_model` as `tiny`, until the block ends."""
    skip_without("loopback")
    if "--replicas" in options:
        skip_without("shared memory")  # of Ray
    write_config(folder / "tiny")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    asked = [model] if model else [str(folder / "tiny"), "--dummy"]
    command = [sys.executable, "-m", "rooflab.bench", "serve", *asked, "--port", str(port)]
    environment = {**os.environ, "ROOFLAB_API_KEY": key, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([*command, *options], env=environment, text=True, stdout=subprocess.PIPE) as process:
        found = Served(f"http://127.0.0.1:{port}", process)
        try:
            end, healthy = time.monotonic() + START_S, False
            while not healthy:
                assert process.poll() is None and time.monotonic() < end, "the server did not start"
                time.sleep(0.1)
                with suppress(OSError):
                    healthy = found.ask("/health")[0] == 200
            yield found
        finally:
            process.kill()


@contextmanager
def stub_server(*options: str) -> Iterator[str]:
    """The address of a stub that answers after a millisecond, and with a millisecond between tokens."""
    skip_without("loopback")
    command = [sys.executable, str(STUB), "--interval-ms", "1", "--ttft-ms", "1", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.kill()
