"""Serves several engines behind one address with Ray Serve, which replaces engines that die.

Ray's proxy draws two engines at random, and sends the request to the engine with fewer requests.  The proxy does not
know which prefixes an engine has cached.  If an engine dies, its streams stop without a finish reason.  Its clients
must send their requests again.
"""

from __future__ import annotations

import logging
import os
import re
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import Any

import ray
import torch
from ray import serve
from ray.serve.config import AutoscalingConfig, HTTPOptions
from ray.serve.schema import LoggingConfig
from starlette.types import ASGIApp

from rooflab.engine.serve.api import make_app
from rooflab.engine.serve.client import Engine
from rooflab.engine.serve.limits import Limits
from rooflab.engine.serve.server import SLOW_READER_S, bound, hosts_of, service_of, url_of

APPLICATION_NAME = "rooflab"
MAX_EXTRA_REQUESTS = 16
"""The most requests above the limit that one replica may hold while it refuses them."""
HEALTH_CHECK_S = 2.0
"""Seconds between two of Ray's checks that a replica's engine is alive."""


@dataclass(frozen=True)
class Replicas:
    """Describes the number of replicas and their Ray cluster.  Raises `ValueError` on a number below 1."""

    count: int
    most: int | None = None
    """The most replicas.  Ray adds a replica for each full batch of requests that run or wait."""
    cluster: str | None = None
    """The address of a Ray cluster; `auto` is the cluster of this machine.  None starts a cluster here."""

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"replicas: expected at least 1, got {self.count}")
        if self.most is not None and self.most < self.count:
            raise ValueError(f"max_replicas: expected at least the {self.count} of replicas, got {self.most}")


@serve.ingress()
class Replica:
    """Runs one engine and its HTTP interface, in a process that Ray starts."""

    async def __init__(self, options: Mapping[str, Any], name: str | None, limits: Limits, threads: int, host: str):  # type: ignore[misc]  # Ray awaits it
        self._engine = Engine(options, threads)
        service = await service_of(self._engine, options, name, limits)
        self._app = make_app(service, hosts_of(host), alone=False)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Returns the ASGI application.  Ray Serve calls this method after the constructor."""
        return self._app

    async def check_health(self) -> None:
        """Raises like `Engine.check`.  Ray calls this every `HEALTH_CHECK_S` seconds and replaces a failed replica."""
        self._engine.check()


def serve_replicas(
    options: Mapping[str, Any],
    replicas: Replicas,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    name: str | None = None,
    limits: Limits | None = None,
    threads: int | None = None,
    drain_s: float = 30.0,
    say: Callable[[str], None] = lambda text: None,
) -> None:
    """Serves several engines `LLM(**options)` at `host` and `port` until SIGINT or SIGTERM.

    Each engine has one GPU, or `threads` CPU threads (by default its share of cores). `server.serve` explains the other
    arguments. Raises `ValueError` if the Ray cluster is missing, the port is taken, or the model cannot be loaded."""
    limits, batch_size = limits or Limits(), int(options["max_num_seqs"])
    threads = threads or max(1, (os.cpu_count() or 1) // (replicas.most or replicas.count))
    on_gpu = torch.device(options["device"]).type == "cuda" if options.get("device") else torch.cuda.is_available()
    replica_options: dict[str, Any] = {"num_replicas": replicas.count}
    if replicas.most is not None:
        replica_options = {"autoscaling_config": AutoscalingConfig(
            min_replicas=replicas.count, max_replicas=replicas.most, target_ongoing_requests=batch_size
        )}  # fmt: skip
    deployment = serve.deployment(Replica, **replica_options).options(
        name="engine",
        ray_actor_options={"num_gpus": 1} if on_gpu else {"num_cpus": threads},
        # What is above the limit must reach the replica, which answers 429: Ray's proxy would keep it, without a limit.
        max_ongoing_requests=batch_size + limits.max_queue + MAX_EXTRA_REQUESTS,
        health_check_period_s=HEALTH_CHECK_S,
        graceful_shutdown_timeout_s=drain_s,
        logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
    )
    bound(host, port).close()
    # By default Ray gives its proxy 5 s to start, on a busy machine too few, and kills it.
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
    with _cluster(replicas.cluster, threads * (replicas.most or replicas.count)):
        stop_event = Event()
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, lambda *_: stop_event.set())
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        serve.start(http_options=HTTPOptions(
            host=host, port=port, keep_alive_timeout_s=limits.keep_alive_s,
            request_timeout_s=limits.timeout_s + SLOW_READER_S,  # of a request whose body never ends, too
        ))  # fmt: skip
        try:
            serve.run(deployment.bind(options, name, limits, threads, host), name=APPLICATION_NAME)
            say(f"{url_of(host, port)} answers; SIGTERM or Ctrl-C ends it")
            stop_event.wait()
        except RuntimeError as error:
            raise ValueError(f"replicas: no replica started: {_reason(error)}") from error
        finally:
            serve.delete(APPLICATION_NAME)  # waits for the answers under way; what else runs on the cluster stays


def _reason(error: RuntimeError) -> str:
    """Returns why a deployment failed: the text of the last error in the replica's traceback, or else Ray's message."""
    app_status = serve.status().applications.get(APPLICATION_NAME)
    messages = [deployment.message for deployment in app_status.deployments.values()] if app_status else []
    message_lines = "\n".join(messages).splitlines()
    error_lines = [line for line in message_lines if re.match(r"\w*Error: ", line)]
    return error_lines[-1].partition(": ")[2] if error_lines else str(error)


@contextmanager
def _cluster(address: str | None, cpus: int) -> Iterator[None]:
    cpu_args = {} if address else {"num_cpus": max(cpus, os.cpu_count() or 1)}
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, **cpu_args)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ValueError(f"ray: expected a cluster at {address!r}, got {error}") from error
    try:
        yield
    finally:
        ray.shutdown()
