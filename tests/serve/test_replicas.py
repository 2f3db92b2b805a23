"""Two engines behind one address, one of which is killed under load; and the answers to Kubernetes' probes."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import kubernetes_validate
import psutil
import pytest
import typer
import yaml
from served import WAIT_S, Served, served

from rooflab.bench.cli.app import app
from rooflab.engine.serve import extras
from rooflab.engine.serve.limits import OPEN_PATHS

PROMPTS = [[3 + number, 5, 7] for number in range(8)]
TOKENS = 160
SILENT_S = 2.0
"""A stream that says nothing for so long is one of a replica that was stopped; others have a token every 10 ms."""


@pytest.mark.slow  # 200 s, in which ten processes use both cores
@pytest.mark.timeout(900)
def test_two_engines_behind_one_address(tmp_path: Path) -> None:
    """In this order, and one server for all of it, since its start takes half a minute."""
    with served(tmp_path, "--replicas", "2", "--threads", "1", "--device", "cpu") as two:
        a_killed_replica_costs_its_own_streams_alone_and_comes_back(two)
        errors_pass_through_and_there_is_no_view_of_one_replica(two)
        a_signal_lets_a_stream_end(two)


def body(prompt: list[int], **more: object) -> dict[str, object]:
    fixed = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    return {**fixed, **more}


def stream(served: Served, prompt: list[int], heard: Callable[[], None] = lambda: None) -> tuple[str, str | None]:
    """The text of a stream, and its finish reason; None of one that broke off.  `heard` is called at each line."""
    request = urllib.request.Request(
        f"{served.url}/v1/completions",
        json.dumps(body(prompt, stream=True)).encode(),
        {"content-type": "application/json"},
    )
    text, reason = "", None
    with suppress(OSError, http.client.HTTPException), urllib.request.urlopen(request, timeout=WAIT_S) as lines:
        for line in lines:
            heard()
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    return text, None
                text += event["choices"][0]["text"]
                reason = event["choices"][0]["finish_reason"]
    return text, reason


def replicas(served: Served) -> dict[int, psutil.Process]:
    """The processes of the replicas that have an engine."""
    below = psutil.Process(served.process.pid).children(recursive=True)
    return {one.pid: one for one in below if "ServeReplica" in one.name() and one.children()}


def a_killed_replica_costs_its_own_streams_alone_and_comes_back(two: Served) -> None:
    right = [two.ask("/v1/completions", body(prompt))[1]["choices"][0]["text"] for prompt in PROMPTS]
    before, ended = replicas(two), threading.Event()
    found: list[list[tuple[str, str | None]]] = [[] for _ in PROMPTS]
    heard_s = [time.monotonic()] * len(PROMPTS)

    def user(place: int) -> None:
        while not ended.is_set():
            found[place].append(stream(two, PROMPTS[place], lambda: heard_s.__setitem__(place, time.monotonic())))

    with ThreadPoolExecutor(len(PROMPTS)) as users:
        waiting = [users.submit(user, place) for place in range(len(PROMPTS))]
        try:
            wait_for(lambda: min(map(len, found)) >= 1)  # all have had an answer, so that both replicas are busy
            victim = next(iter(before.values()))
            killed = [victim, *victim.children()]
            for engine in killed[1:]:
                engine.suspend()  # so that its streams are under way when it is killed, however fast they are
            wait_for(lambda: time.monotonic() - min(heard_s) >= SILENT_S)
            victim.kill()
            for engine in killed[1:]:
                engine.resume()
            wanted = [len(own) + 2 for own in found]  # the answer that the kill met, and one that began after it
            wait_for(lambda: all(len(own) >= count for own, count in zip(found, wanted, strict=True)))
        finally:
            ended.set()  # beside eight streams a replica takes minutes to start
        wait_for(lambda: len(replicas(two)) == 2 and victim.pid not in replicas(two))
        assert all(one.result() is None for one in waiting)
    answers = [(text, reason, right[place]) for place, own in enumerate(found) for text, reason in own]
    broken = [wanted.startswith(text) for text, reason, wanted in answers if not reason]
    assert all(text == wanted for text, reason, wanted in answers if reason) and len(broken) < len(answers)
    assert 1 <= len(broken) <= len(PROMPTS) and all(broken)
    assert [stream(two, prompt) for prompt in PROMPTS] == [(wanted, "length") for wanted in right]
    assert not any(process.is_running() for process in killed), "its engine has ended too"


def wait_for(there: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not there():
        assert time.monotonic() < end
        time.sleep(0.05)


def errors_pass_through_and_there_is_no_view_of_one_replica(two: Served) -> None:
    status, reply = two.ask("/v1/completions", body(PROMPTS[0], temperature=-1))
    assert (status, reply["error"]["param"]) == (400, "temperature")
    assert [two.ask(path)[0] for path in ("/v1/models", "/metrics", "/steps", "/")] == [200, 404, 404, 404]
    assert two.ask("/tokenize", b"x", {"content-type": "text/plain"})[0] == 415
    assert two.ask("/health", headers={"a": "x" * 66_000})[0] == 431


def a_signal_lets_a_stream_end(two: Served) -> None:
    with ThreadPoolExecutor() as pool:
        reader = pool.submit(stream, two, PROMPTS[0])
        time.sleep(0.1)
        os.kill(two.process.pid, signal.SIGTERM)
        assert reader.result()[1] == "length" and two.process.wait(WAIT_S) == 0


def test_the_manifest_is_kubernetes_and_says_what_the_server_understands() -> None:
    """Documents by their schemas, strictly; the command by our command line; probes without a key; a drain's time."""
    text = Path(extras.__file__).with_name("kubernetes.yaml").read_text()
    documents = {document["kind"]: document for document in yaml.safe_load_all(text)}
    for document in documents.values():
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    pod = documents["Deployment"]["spec"]["template"]["spec"]
    server = pod["containers"][0]
    name, *arguments = server["command"][1:]
    given = typer.main.get_command(app).commands[name].make_context(name, arguments).params
    sleep_s = float(server["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > given["drain_s"] + sleep_s + 10
    assert given["port"] == server["ports"][0]["containerPort"]
    assert {server[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")} <= {*OPEN_PATHS}
    metric = documents["HorizontalPodAutoscaler"]["spec"]["metrics"][0]["pods"]["metric"]["name"]
    assert f"name: {{as: {metric}}}" in text and metric.replace("_", ":", 1) in text
