"""Controls the engine's process from the server: starts it, sends prompts, and gives each caller its tokens."""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import pickle
import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio

from rooflab.engine.sequence import FinishReason, SamplingParams
from rooflab.engine.serve import worker
from rooflab.engine.serve.wire import (
    Abort,
    ModelNotLoaded,
    Queued,
    Ready,
    State,
    StepLine,
    Stepped,
    Stop,
    Submit,
    ToEngine,
    Token,
    Watch,
)

MAX_STEP_LINES = 20_000
"""The number of steps whose lines are kept for `GET /steps`."""
MAX_READ_TOKENS = 256
"""The most tokens that one reader takes in one turn of the event loop.  They take 8 ms."""
END_TIMEOUT_S = 10.0
"""Seconds that the engine may take to finish its last step."""
STALL_TIMEOUT_S = 60.0
"""An engine with work is stalled if it is silent for this many seconds.  A step of 2,048 prompt tokens sends once."""


class EngineDied(RuntimeError):
    """Reports that the engine no longer works.  Everything that it was computing is lost."""


@dataclass(eq=False)
class Call:
    """Describes a prompt in the engine, with the times of its phases on the `perf_counter` clock."""

    key: int
    prompt_tokens: int
    arrival_s: float
    params: SamplingParams
    inbox: Inbox
    """The inbox that gets the tokens of this prompt's answers."""
    accepted: asyncio.Future[None]
    trace_parent: str | None
    """The caller's span, as a `traceparent` header of W3C."""
    started_s: float | None = None
    """The time at which the first step with tokens of the prompt began."""
    cached_tokens: int = 0
    """The number of prompt tokens that were already in the KV cache."""
    token_times_s: list[list[float]] = field(default_factory=list)
    """For each answer, the times at which its tokens arrived at the server."""
    finish_reasons: dict[int, FinishReason] = field(default_factory=dict)
    """The finish reason of each answer that has ended, by the number of the answer."""

    @property
    def ended(self) -> bool:
        """Returns whether all answers to the prompt have ended."""
        return len(self.finish_reasons) == self.params.n


class Inbox:
    """Queues tokens for one reader, without a size limit, because every answer has a limited number of tokens."""

    def __init__(self) -> None:
        self._come: asyncio.Queue[tuple[Call, Token] | EngineDied | TimeoutError] = asyncio.Queue()
        self.put = self._come.put_nowait
        """Adds a call with its token, or an error after which no more tokens come."""

    async def get(self) -> list[tuple[Call, Token]]:
        """Waits for tokens, and returns at most `MAX_READ_TOKENS` of them.  Raises an error that was given to `put`."""
        arrived_tokens: list[tuple[Call, Token]] = []
        if self._come.qsize() > MAX_READ_TOKENS:  # its reader was slow
            await asyncio.sleep(0)
        while len(arrived_tokens) < MAX_READ_TOKENS and not (arrived_tokens and self._come.empty()):
            queue_item = await self._come.get()
            if isinstance(queue_item, Exception):
                self.put(queue_item)
                if not arrived_tokens:
                    raise queue_item
                break
            arrived_tokens.append(queue_item)
        return arrived_tokens


class Engine:
    """Controls the engine's process.  Call `start` first.  Call all methods from one event loop.

    Three attributes are callbacks.  `observe` gets every step.  `gap` gets the seconds between two tokens of an answer.
    The functions in `ended` get every `Call` that has ended or was dropped."""

    def __init__(self, options: Mapping[str, Any], threads: int | None = None):
        self.info: Ready
        self.state = State()
        self.steps: deque[StepLine] = deque(maxlen=MAX_STEP_LINES)
        self.observe: Callable[[Stepped], None] = lambda stepped: None
        self.gap: Callable[[float], None] = lambda seconds: None
        self.ended: list[Callable[[Call], None]] = []
        self.died, self.ending = asyncio.Event(), False
        self.why, self._heard_s = "", 0.0
        """The reason for the engine's end; and the time of its last message, or of its first work."""
        self.calls: dict[int, Call] = {}
        """The calls that have not ended, by their keys."""
        self._keys = itertools.count()
        self._watchers = 0
        self._folder = Path(tempfile.mkdtemp(prefix="rooflab-"))  # for this user alone
        address = f"ipc://{self._folder}/engine"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._process = multiprocessing.get_context("spawn").Process(
            target=worker.run, args=(address, dict(options), threads), name="engine", daemon=True
        )

    async def start(self) -> None:
        """Starts the process and loads the model.  Raises `ValueError` with the engine's message if loading fails."""
        self._process.start()
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._process_ended)
        message_task = asyncio.ensure_future(self._socket.recv())
        exit_task = asyncio.ensure_future(self.died.wait())
        await asyncio.wait((message_task, exit_task), return_when=asyncio.FIRST_COMPLETED)
        exit_task.cancel()
        if not message_task.done():
            message_task.cancel()
            raise ValueError(f"model: the engine's process ended with status {self._process.exitcode} while it loaded")
        message = pickle.loads(message_task.result())
        if isinstance(message, ModelNotLoaded):
            raise ValueError(message.reason)
        self.info = message
        self._receiver = asyncio.create_task(self._receive(), name="receive")
        self._receiver.add_done_callback(self._task_ended)  # else callers would wait for ever behind an error in it

    def check(self) -> None:
        """Raises `EngineDied` if the engine has ended, or if it has work but sends no messages."""
        silence_s = time.perf_counter() - self._heard_s
        if self.died.is_set():
            raise EngineDied(self.why)
        if self.calls and silence_s > STALL_TIMEOUT_S:
            raise EngineDied(f"the engine has work, and has not made a step for {silence_s:.0f} s")

    async def stop(self) -> None:
        """Ends the process.  Everything that the engine is still computing is lost."""
        if self._process.is_alive() and hasattr(self, "info"):  # while it loads, it does not listen
            self._say(Stop())
            with suppress(TimeoutError):
                await asyncio.wait_for(self.died.wait(), END_TIMEOUT_S)
        if self._process.pid is not None:
            self._process.kill()
            self._process.join()
        if hasattr(self, "_receiver"):
            self._receiver.cancel()
        self._socket.close(linger=0)
        self._context.term()
        shutil.rmtree(self._folder)

    async def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        inbox: Inbox,
        arrival_s: float | None = None,
        trace_parent: str | None = None,
    ) -> list[Call]:
        """Queues all prompts of a request at once between two steps, or none after an error.  The tokens go to `inbox`.

        Raises `ValueError` if the engine cannot serve one of the prompts, and `EngineDied` if the engine has ended."""
        if self.died.is_set():
            raise EngineDied(self.why)
        arrival_s = time.perf_counter() if arrival_s is None else arrival_s
        accepted_future = asyncio.get_running_loop().create_future()
        call_args = (arrival_s, params, inbox, accepted_future, trace_parent)
        calls = [Call(next(self._keys), len(prompt_ids), *call_args) for prompt_ids in prompts]
        if not self.calls:
            self._heard_s = time.perf_counter()
        for call in calls:
            call.token_times_s = [[] for _ in range(params.n)]
            self.calls[call.key] = call
        ids_by_key = {call.key: list(prompt_ids) for call, prompt_ids in zip(calls, prompts, strict=True)}
        self._say(Submit(ids_by_key, params, arrival_s))
        try:
            await accepted_future
        except ValueError:
            for key in ids_by_key:
                del self.calls[key]
            raise
        except BaseException:
            self.drop(calls)
            raise
        return calls

    def drop(self, calls: Sequence[Call]) -> None:
        """Aborts all `calls` that have not ended."""
        open_calls = [call for call in calls if self.calls.pop(call.key, None)]
        if open_calls and not self.died.is_set():
            self._say(Abort(tuple(call.key for call in open_calls)))
        for call, observer in itertools.product(open_calls, self.ended):
            observer(call)

    def watch(self, on: bool) -> None:
        """Adds (`on=True`) or removes a watcher.  With a watcher, steps on a CPU report the time of each op."""
        old_watchers, self._watchers = self._watchers, self._watchers + (1 if on else -1)
        if bool(old_watchers) != bool(self._watchers) and not self.died.is_set():
            self._say(Watch(on))

    def _say(self, message: ToEngine) -> None:
        self._socket.send(pickle.dumps(message))

    async def _receive(self) -> None:
        while True:
            message = pickle.loads(await self._socket.recv())
            self._heard_s = time.perf_counter()
            match message:  # a caller that left has cancelled its future, and drops the call in its next turn
                case Queued(key, refusal) if key in self.calls and not (future := self.calls[key].accepted).done():
                    future.set_exception(ValueError(refusal)) if refusal else future.set_result(None)
                case Stepped():
                    self._stepped(message)

    def _stepped(self, message: Stepped) -> None:
        now_s = time.perf_counter()
        self.state = message.state
        if message.step is not None:
            self.steps.append(message.step)
        for key, time_s, num_cached in message.started:
            if call := self.calls.get(key):
                call.started_s, call.cached_tokens = time_s, num_cached
        self.observe(message)
        for token in message.tokens:
            call = self.calls.get(token.key)
            if call is None:
                continue  # dropped since
            token_times_s = call.token_times_s[token.answer]
            if token_times_s:
                self.gap(now_s - token_times_s[-1])
            token_times_s.append(now_s)
            if token.finish_reason is not None:
                call.finish_reasons[token.answer] = token.finish_reason
            call.inbox.put((call, token))
            if call.ended:
                del self.calls[call.key]
                for observer in self.ended:
                    observer(call)

    def _process_ended(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._process.join(END_TIMEOUT_S)  # the sentinel is ready before the status
        self._lost(f"the engine's process ended with status {self._process.exitcode}")

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (task_error := task.exception()) is not None:
            self._lost(f"the server's task {task.get_name()!r} ended: {task_error!r}")

    def _lost(self, why: str) -> None:
        self.why = self.why or why
        self.died.set()
        for call in self.calls.values():
            self._end(call, EngineDied(self.why))
        self.calls.clear()

    def cut(self) -> None:
        """Ends all calls, because the server ends.  Readers first get their queued tokens, then a `TimeoutError`."""
        self.ending = True
        for call in self.calls.values():
            self._end(call, TimeoutError())

    def _end(self, call: Call, error: EngineDied | TimeoutError) -> None:
        call.inbox.put(error)
        if not call.accepted.done():
            call.accepted.set_exception(EngineDied(self.why or "the server ends"))
