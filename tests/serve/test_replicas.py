"""Two engines behind one address, one of which is killed under load; and what Kubernetes is told."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import kubernetes_validate
import psutil
import pytest
import typer
import yaml
from served import WAIT_S, Served, served

import rooflab.engine.serve
from rooflab.bench.cli.app import app
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
    connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=WAIT_S)
    text, reason = "", None
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps(body(prompt, stream=True)), {"content-type": "application/json"}
        )
        for line in connection.getresponse():
            heard()
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    return text, None
                text += event["choices"][0]["text"]
                reason = event["choices"][0]["finish_reason"]
    except (OSError, http.client.HTTPException):
        return text, None
    finally:
        connection.close()
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

    users = [threading.Thread(target=user, args=(place,)) for place in range(len(PROMPTS))]
    for one in users:
        one.start()
    try:
        while min(map(len, found)) < 1:  # all have had an answer, so that both replicas are busy
            time.sleep(0.05)
        victim = next(iter(before.values()))
        killed = [victim, *victim.children()]
        for engine in killed[1:]:
            engine.suspend()  # so that its streams are under way when it is killed, however fast they are
        while time.monotonic() - min(heard_s) < SILENT_S:
            time.sleep(0.05)
        victim.kill()
        for engine in killed[1:]:
            engine.resume()
        at_kill = [len(own) for own in found]
        while any(len(own) < then + 2 for own, then in zip(found, at_kill, strict=True)):
            time.sleep(0.05)  # the answer that the kill met, and one that began after it
        ended.set()  # beside eight streams a replica takes minutes to start
        end = time.monotonic() + WAIT_S
        while len(now := replicas(two)) < 2 or victim.pid in now:
            assert time.monotonic() < end, "no new replica came"
            time.sleep(0.2)
    finally:
        ended.set()
        for one in users:
            one.join()
    whole = [text == wanted for own, wanted in zip(found, right, strict=True) for text, reason in own if reason]
    broken = [(text, wanted) for own, wanted in zip(found, right, strict=True) for text, reason in own if not reason]
    assert whole and all(whole)
    assert 1 <= len(broken) <= len(PROMPTS) and all(wanted.startswith(text) for text, wanted in broken)
    assert [stream(two, prompt) for prompt in PROMPTS] == [(wanted, "length") for wanted in right]
    assert not any(process.is_running() for process in killed), "its engine has ended too"


def errors_pass_through_and_there_is_no_view_of_one_replica(two: Served) -> None:
    status, reply = two.ask("/v1/completions", body(PROMPTS[0], temperature=-1))
    assert (status, reply["error"]["param"]) == (400, "temperature")
    assert [two.ask(path)[0] for path in ("/v1/models", "/metrics", "/steps", "/")] == [200, 404, 404, 404]
    assert two.ask("/tokenize", b"x", {"content-type": "text/plain"})[0] == 415
    assert two.ask("/health", headers={"a": "x" * 66_000})[0] == 431
    connection = http.client.HTTPConnection(urlsplit(two.url).netloc, timeout=WAIT_S)
    connection.request("HEAD", "/v1/models")
    reply = connection.getresponse()
    assert reply.status == 200 and len(reply.headers.get_all("x-request-id")) == 1
    connection.close()


def a_signal_lets_a_stream_end(two: Served) -> None:
    got: list[tuple[str, str | None]] = []
    reader = threading.Thread(target=lambda: got.append(stream(two, PROMPTS[0])))
    reader.start()
    time.sleep(0.1)
    os.kill(two.process.pid, signal.SIGTERM)
    reader.join()
    assert got[0][1] == "length" and two.process.wait(WAIT_S) == 0


def test_the_manifest_is_kubernetes_and_says_what_the_server_understands() -> None:
    """Documents by their schemas, strictly; the command by our command line; probes without a key; a drain's time."""
    text = Path(rooflab.engine.serve.__file__).with_name("kubernetes.yaml").read_text()
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
