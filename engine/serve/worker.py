"""Runs the engine in its own process.  Takes requests between steps, and sends a message after each step."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, assert_never

import torch
import zmq

from rooflab.engine.choose.op_times import Spent, timed_ops
from rooflab.engine.llm import LLM
from rooflab.engine.scheduler import pairs_of
from rooflab.engine.sequence import Sequence
from rooflab.engine.serve.wire import (
    Abort,
    FromEngine,
    ModelNotLoaded,
    Queued,
    Ready,
    Started,
    State,
    StepLine,
    Stepped,
    Stop,
    Submit,
    ToEngine,
    Token,
    Watch,
)
from rooflab.kernels._waiting import run_times, waiting_since


def run(address: str, options: Mapping[str, Any], threads: int | None) -> None:
    """Loads `LLM(**options)` and works for the server at `address` until the server sends `Stop` or has ended.

    `threads` is the number of torch's threads on a CPU.  None keeps torch's default.
    """
    threading.Thread(target=_end_with_server, args=(address,), daemon=True).start()
    for signum in (signal.SIGINT, signal.SIGTERM):  # a terminal sends them to both; the server drains and says Stop
        signal.signal(signum, signal.SIG_IGN)
    socket = zmq.Context().socket(zmq.DEALER)
    socket.setsockopt(zmq.SNDHWM, 0)  # an engine never waits for its server
    socket.connect(address)
    if threads:
        torch.set_num_threads(threads)
    try:
        llm = LLM(**options)
    except (ValueError, OSError, MemoryError) as error:
        socket.send(pickle.dumps(ModelNotLoaded(str(error))))
        socket.close()
        return
    worker, kv_blocks, batch = Worker(llm, socket), llm.scheduler.blocks, llm.scheduler.max_num_seqs
    model_sizes = (llm.arch.vocab_size, llm.max_model_len, batch, kv_blocks.num_blocks, kv_blocks.block_size)
    worker.say(Ready(llm.arch.name, str(llm.device), llm.dtype_name, *model_sizes, llm.ops.describe()))
    worker.run()
    socket.close()


def _end_with_server(address: str) -> None:
    """Waits until the server process ends.  Then ends this worker process at once, even in the middle of a step."""
    server_process = multiprocessing.parent_process()
    if server_process is not None:  # it is, where `run` is the target of a process
        server_process.join()
        shutil.rmtree(Path(address.removeprefix("ipc://")).parent, ignore_errors=True)
        os._exit(1)


class Worker:
    """Runs the steps of an engine for one server."""

    def __init__(self, llm: LLM, socket: zmq.Socket[bytes]):
        self.llm = llm
        self._socket = socket
        self._answers: dict[int, list[Sequence]] = {}
        """The sequences of each prompt that has not ended, by the key that the server gave the prompt."""
        self._name: dict[Sequence, tuple[int, int, int]] = {}
        """For each answer that has not ended: its prompt's key, its number, and how many of its tokens were sent."""
        self._fresh: set[Sequence] = set()
        """The sequences whose prompt has no computed token yet."""
        self._steps = 0
        self._spent: Spent = defaultdict(list)
        self._watching = ExitStack()

    def run(self) -> None:
        """Runs steps until the server sends `Stop`."""
        while True:
            if not self.llm.has_work:
                self._socket.poll()
            while self._socket.poll(0):
                message: ToEngine = pickle.loads(self._socket.recv())
                if isinstance(message, Stop):
                    return
                self._take(message)
            if self.llm.has_work:
                self._step()

    def say(self, message: FromEngine) -> None:
        """Sends a message to the server without waiting."""
        self._socket.send(pickle.dumps(message))

    def _take(self, message: Submit | Abort | Watch) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Abort(keys):
                self._abort(keys)
                self.say(Stepped(self._state()))
            case Watch(on):
                self._watching.close()
                self._spent.clear()
                if on and self.llm.device.type == "cpu":
                    self._watching.enter_context(timed_ops(self.llm.runner, self._spent))
            case _:
                assert_never(message)

    def _submit(self, message: Submit) -> None:
        first_key = min(message.prompts)
        try:
            for key, prompt_ids in message.prompts.items():
                answers = self.llm.submit(prompt_ids, message.params, message.arrival_s)
                self._answers[key] = answers
                for answer_index, sequence in enumerate(answers):
                    self._name[sequence] = key, answer_index, 0
                self._fresh.add(answers[0])
        except ValueError as error:
            self._abort(message.prompts)
            self.say(Queued(first_key, str(error)))
        else:
            self.say(Queued(first_key))

    def _abort(self, keys: Iterable[int]) -> None:
        for key in keys:
            answers = self._answers.pop(key, [])
            self.llm.core.abort(answers)
            for sequence in answers:
                self._forget(sequence)

    def _step(self) -> None:
        engine_core, kv_blocks = self.llm.core, self.llm.scheduler.blocks
        old_num_evicted, self._steps = kv_blocks.evicted, self._steps + 1
        start_times = run_times() if self.llm.device.type == "cpu" else None
        begin_s = time.perf_counter()
        sequences = self.llm.step()
        end_s = time.perf_counter()
        step, ops = engine_core.last, {op: sum(op_times) for op, op_times in self._spent.items()}
        self._spent.clear()
        chunks = step.chunks if step else []
        started_prompts = []
        for chunk in chunks:
            if chunk.sequence in self._fresh:
                self._fresh.remove(chunk.sequence)
                started_prompts.append(Started(self._name[chunk.sequence][0], begin_s, chunk.start))
        tokens = tuple(token for sequence in dict.fromkeys(sequences) for token in self._tokens(sequence))
        engine_state = self._state()
        drafts = engine_core.speculator and engine_core.speculator.last
        step_line = StepLine(
            number=self._steps,
            begin_s=begin_s,
            end_s=end_s,
            num_decodes=step.num_decodes if step else 0,
            decode_keys=int(self.llm.runner.batch.seq_lens[: step.num_decodes].sum()) if step else 0,
            prompt_tokens=sum(chunk.end - chunk.start for chunk in chunks),
            prompt_pairs=sum(pairs_of(chunk.start, chunk.end) for chunk in chunks),
            tokens=len(tokens),
            preempted=len(step.preempted) if step else 0,
            evicted=kv_blocks.evicted - old_num_evicted,
            running=engine_state.running,
            waiting=engine_state.waiting,
            waited=None if start_times is None else waiting_since(start_times),
            ops_s=ops,
            **(asdict(drafts) if drafts else {}),
        )
        self.say(Stepped(engine_state, step_line, tokens, tuple(started_prompts)))

    def _tokens(self, sequence: Sequence) -> list[Token]:
        """Returns a sequence's tokens that were not yet sent to the server.  Forgets the sequence if it has ended."""
        key, number, num_sent = self._name[sequence]
        ids = sequence.output_ids
        self._name[sequence] = key, number, len(ids)
        logprobs = sequence.logprobs if sequence.params.logprobs is not None else None
        last = len(ids) - 1 if sequence.finish_reason is not None else -1
        tokens = [
            Token(key, number, ids[i], sequence.finish_reason if i == last else None, logprobs[i] if logprobs else None)
            for i in range(num_sent, len(ids))
        ]
        if sequence.finish_reason is not None:
            self._forget(sequence)
            if not any(answer in self._name for answer in self._answers[key]):
                del self._answers[key]
        return tokens

    def _forget(self, sequence: Sequence) -> None:
        self._name.pop(sequence, None)
        self._fresh.discard(sequence)

    def _state(self) -> State:
        scheduler, kv_blocks = self.llm.scheduler, self.llm.scheduler.blocks
        return State(
            len(scheduler.running),
            len(scheduler.waiting),
            kv_blocks.num_blocks - kv_blocks.num_free,
            kv_blocks.num_shared,
            kv_blocks.num_cached,
        )
