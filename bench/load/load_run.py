"""Runs a load: sends warm-up and measured requests, and makes the trace (times of all requests and tokens)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from rooflab.bench.load.answers import read_answer
from rooflab.bench.load.causes import on_our_clock
from rooflab.bench.load.client import Endpoint, Shot, body_of, clock, closed_loop, open_loop, undisturbed
from rooflab.bench.load.data import Data, Prompt
from rooflab.bench.load.trace import Trace

ENDPOINT_PATHS: Mapping[str, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
WARMUP_SEED = 2**63
"""Added to the seed of the warm-up, so that the warm-up does not put the run's first prompt into the prefix cache."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Holds the settings of a load run.  Raises `ValueError` if two settings contradict."""

    rate: float | None = None
    """The requests per second of an open loop (a Poisson process); infinite: all come at once.  None: a closed loop."""
    concurrency: int = 1
    """The number of requests in flight in a closed loop."""
    num_prompts: int = 100
    warmup: int = 1
    """The number of single requests before the run.  The first one shows whether the server takes such requests."""
    data: Data = field(default_factory=Data)
    endpoint: str = "completions"
    model: str = ""
    ignore_eos: bool = True
    """Whether answers get exactly the requested lengths; not every server knows this field."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further fields that each request gets."""
    seed: int = 0
    running_usage: bool = True
    """Whether to ask for the tokens so far with each chunk; the warm-up shows whether the server gives them."""

    def __post_init__(self) -> None:
        if self.rate is not None and not self.rate > 0:
            raise ValueError(f"rate: expected a number above 0, got {self.rate}")
        for name in ("concurrency", "num_prompts", "warmup"):
            if (option_value := getattr(self, name)) < 1:
                raise ValueError(f"{name}: expected at least 1, got {option_value}")
        if self.endpoint not in ENDPOINT_PATHS:
            raise ValueError(f"endpoint: expected one of {', '.join(ENDPOINT_PATHS)}, got {self.endpoint!r}")
        if self.endpoint == "chat" and self.data.ids is not None:
            raise ValueError("endpoint: a chat takes no token ids; expected --text with it")

    def offsets(self) -> list[float]:
        """Draws the send times of the open loop's requests, in seconds from the start of the loop.  The last one is
        random too.  vLLM scales all times so that the last is `num_prompts / rate`.  This changes the distribution of
        the gaps."""
        assert self.rate is not None, "of an open loop"
        gaps_s = np.random.default_rng(self.seed).exponential(1 / self.rate, self.num_prompts)
        return [float(arrival_s) for arrival_s in np.cumsum(gaps_s)]

    def shots(self, seed: int) -> Iterator[Shot]:
        """Yields requests without end, drawn at random with `seed`."""
        num_answers = answers_per_request if type(answers_per_request := self.extra.get("n")) is int else 1
        for index, prompt in enumerate(self.data.prompts(seed)):
            yield Shot(index, body_of(self._fields(prompt)), prompt.tokens, num_answers * prompt.output_tokens)

    def warm_ups(self) -> Iterator[Shot]:
        """Yields the requests of the warm-up."""
        return islice(self.shots(self.seed + WARMUP_SEED), self.warmup)

    def _fields(self, prompt: Prompt) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt.content}]
        usage_options = {"continuous_usage_stats": True} if self.running_usage else {}
        return {
            "model": self.model,
            **({"messages": messages} if self.endpoint == "chat" else {"prompt": prompt.content}),
            "max_tokens": prompt.output_tokens,
            "stream": True,
            "stream_options": {"include_usage": True, **usage_options},
            **({"ignore_eos": True} if self.ignore_eos else {}),
            **self.extra,
        }

    def case(self) -> dict[str, Any]:
        """Returns the settings of this load run for its record.  The address of the server is not included."""
        data = self.data
        lengths = {name: ":".join(map(str, dict.fromkeys(getattr(data, name)))) for name in ("input_len", "output_len")}
        case: dict[str, Any] = {"model": self.model, "endpoint": self.endpoint, "data": data.kind}
        case |= {"prompts": "text" if data.ids is None else "token ids", "ignore_eos": self.ignore_eos}
        if data.kind != "sharegpt":
            case |= lengths
        if data.kind == "prefix":
            case |= {"prefix_len": data.prefix_len, "groups": data.groups}
        if self.rate is None:
            case |= {"arrivals": "closed", "concurrency": self.concurrency}
        else:
            rate = "inf" if math.isinf(self.rate) else self.rate
            case |= {"arrivals": "poisson", "rate_requests_per_s": rate}
        extra = {f"extra.{name}": body_of({"": field_value})[4:-1].decode() for name, field_value in self.extra.items()}
        return case | extra


def first_model(target: Endpoint) -> str:
    """Returns the name of the first model in the server's list.  Raises `ValueError` if the list has no model."""
    status, json_body, _ = target.get("/v1/models")
    try:
        return str(json_body["data"][0]["id"])
    except (TypeError, KeyError, IndexError) as error:
        raise ValueError(f"model: expected a name, for GET /v1/models gives none (status {status})") from error


def run_load(target: Endpoint, plan: Plan) -> Trace:
    """Runs the load that `plan` describes.  Raises `ValueError` if the server refuses the first warm-up request."""
    plan = _run(_warm_up(target, plan))
    warmup_bodies = {sent_request.body for sent_request in plan.warm_ups()}
    with undisturbed():
        begin_s, exchanges = _run(_load(target, plan))
    last_arrival_s = max((sent_request.scheduled_s for sent_request in exchanges), default=begin_s)
    requests = tuple(map(read_answer, exchanges))
    num_duplicates = len(exchanges) - len({sent_request.body for sent_request in exchanges} - warmup_bodies)
    case = {**plan.case(), "seed": plan.seed}
    return Trace(begin_s, last_arrival_s, requests, case, steps_of(target), num_duplicates)


def steps_of(target: Endpoint) -> tuple[Mapping[str, Any], ...] | None:
    """Returns the engine steps of Rooflab's server, in the client's time.  Returns None for any other server."""
    start_s = clock()
    try:
        status, value, middle_s = target.get("/steps")
    except ValueError:
        return None
    try:
        return on_our_clock(value["steps"], value["now_s"], middle_s, clock() - start_s) if status == 200 else None
    except (TypeError, KeyError):  # another server has a page of this name
        return None


async def _warm_up(target: Endpoint, plan: Plan) -> Plan:
    """Sends the warm-up requests and returns the plan.

    The first request asks the server to count tokens in each chunk of an answer (`running_usage`).  If the server
    rejects this request, the returned plan no longer asks for the counts."""
    for sent_request in plan.warm_ups():
        sent_request.scheduled_s = clock()
        await target.send(sent_request)
        answer = read_answer(sent_request)
        if answer.error and not sent_request.index:
            target.close()
            if plan.running_usage and sent_request.status:
                return await _warm_up(target, replace(plan, running_usage=False))
            option_hint = "; --no-ignore-eos leaves the field out" if "ignore_eos" in answer.error else ""
            raise ValueError(f"url: expected an answer to the first request, got {answer.error}{option_hint}")
    target.close()  # the connections belong to this event loop
    return plan


async def _load(target: Endpoint, plan: Plan) -> tuple[float, list[Shot]]:
    """Makes all prompts, then sends the load to the server.  Returns the start time and the sent requests."""
    requests = list(islice(plan.shots(plan.seed), plan.num_prompts))
    if plan.rate is None:
        begin_s, requests = await closed_loop(target, requests, plan.concurrency)
    else:
        begin_s = await open_loop(target, requests, plan.offsets())
    target.close()
    return begin_s, requests


def _run(work: Coroutine[Any, Any, T]) -> T:
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)
