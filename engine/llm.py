"""Defines the class `LLM`, which takes prompts and returns text, with the time of each token."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rooflab.engine.block_manager import BlockManager
from rooflab.engine.choose.model_shapes import LargestSizes
from rooflab.engine.core import Core
from rooflab.engine.graphs import DecodeGraphs, record_graph
from rooflab.engine.load.generation import with_settings
from rooflab.engine.load.model_files import DEFAULT_MODEL
from rooflab.engine.load.models import open_model
from rooflab.engine.load.tokenizer import Prompt, is_chat
from rooflab.engine.load.weights import load_weights
from rooflab.engine.memory import check_weights_fit, kv_cache_blocks, trim
from rooflab.engine.metrics import Completion, RequestOutput, Timeline, TokenEvent
from rooflab.engine.model import Model
from rooflab.engine.model_runner import ModelRunner
from rooflab.engine.ops import resolve
from rooflab.engine.options import check_pdl, check_sizes, device_of, dtype_of
from rooflab.engine.scheduler import Scheduler
from rooflab.engine.sequence import SamplingParams
from rooflab.engine.sequence import Sequence as EngineSequence
from rooflab.engine.speculate.build import build, opened
from rooflab.engine.speculate.drafter import speculation
from rooflab.engine.stopping import StopText
from rooflab.engine.study import RecomputingCore, StudyOptions, switched
from rooflab.kernels._pdl import pdl as dependent_launches
from rooflab.kernels.precision import pin_matmul_precision
from rooflab.roofline.architecture import Architecture

__all__ = ["DEFAULT_MODEL", "LLM", "Completion", "RequestOutput", "SamplingParams"]


class LLM:
    """Generates text with a language model that runs on Rooflab's kernels.

    - `model` is a GGUF file, a Hugging Face folder with safetensors, or `smollm2-135m` (downloaded once).
    - `dummy=True` allows any preset as `model`, with random weights.  Each token's text is its id.
    - `dtype` is float32, bfloat16, float16 or, on a CPU, int8, int4 or keep (the codes of a GGUF file) for matrices,
      with the rest in bfloat16.  The default is float32 on a CPU and bfloat16 on CUDA.
    - `swap` maps an op to the kernel that the op must use.
    - `interpret` allows Triton kernels on the CPU.
    - `enforce_eager` turns off the replay of recorded decode steps.
    - `overlap` launches a step before the CPU reads the last tokens.  The default is True on CUDA without drafts.
    - `pdl` lets a kernel of a graph start before the previous kernel has ended (`kernels/_pdl.py`).
    - `speculate` drafts up to `num_speculative_tokens` tokens per step, with the same answers (docs/speculate.md).
      `"ngram"` copies earlier text.  `"draft"` uses the smaller model `draft`.  `"eagle"` uses the EAGLE head in the
      folder `draft`.
    - `chunked_prefill` and `prefix_caching` turn on these features.
    - `prefill_chunk` is the maximum number of prompt tokens in a step.
    - `study` turns off other parts of the engine (`StudyOptions`).

    Sets torch's fp32 matmul precision to IEEE for the whole process.  Raises `ValueError` on unsupported options."""

    def __init__(
        self,
        model: str | Path = DEFAULT_MODEL,
        *,
        enforce_eager: bool = False,
        dtype: str | None = None,
        device: str | None = None,
        dummy: bool = False,
        swap: Mapping[str, str] | None = None,
        interpret: bool = False,
        block_size: int = 16,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 8192,
        prefill_chunk: int | None = None,
        overlap: bool | None = None,
        pdl: bool = False,
        prefix_caching: bool = True,
        chunked_prefill: bool = True,
        study: StudyOptions | None = None,
        max_model_len: int | None = None,
        num_kv_blocks: int | None = None,
        speculate: str | None = None,
        num_speculative_tokens: int = 4,
        draft: str | Path | None = None,
        seed: int = 0,
        **beside: Any,
    ):
        study = switched(study, beside)
        check_sizes(
            block_size=block_size, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens,
            num_kv_blocks=num_kv_blocks, max_model_len=max_model_len, prefill_chunk=prefill_chunk,
        )  # fmt: skip
        self.speculation = speculation(speculate, num_speculative_tokens, draft, study.kv_cache, overlap)
        self.device = device_of(device)
        if pdl:
            check_pdl(self.device, enforce_eager)
        pin_matmul_precision()
        self.dtype, weight_codes = dtype_of(dtype, self.device)
        self.dtype_name = weight_codes or str(self.dtype).removeprefix("torch.")
        """The name of the option `dtype`.  `self.dtype` is the dtype of all but the codes of weights."""
        open_with_codes = partial(open_model, dummy=dummy, seed=seed, device=self.device, codes=weight_codes)
        self.arch, self.tokenizer, tensors, self._stop_ids, self._set, plain = open_with_codes(str(model))
        self.max_model_len = max_len = max_model_len or self.arch.max_position
        if max_len > self.arch.max_position:
            raise ValueError(f"max_model_len: expected at most {self.arch.max_position}, got {max_model_len}")
        block_size = max_len if study.contiguous_kv else block_size
        chunking = chunked_prefill and study.kv_cache
        # Without chunks a prompt that is longer than a step's budget runs alone, in one step.
        step_tokens = max_num_batched_tokens if chunking else max(max_num_batched_tokens, max_len)
        draft_source = opened(
            self.speculation, self.arch, self.tokenizer, max_len, self.dtype, self.device, open_with_codes
        )
        max_logit_rows = min(max_num_seqs * draft_source.rows, step_tokens)
        limit_sizes = (block_size, max_len, step_tokens, min(max_num_seqs, step_tokens), max_logit_rows)
        self.limits = LargestSizes(self.arch, self.device, self.dtype, *limit_sizes, weight_codes, bool(plain))
        check_weights_fit(self.limits, draft_source.arch)  # before kernels are timed
        # Before the weights are read: an error about a kernel comes after a second, not after a minute.
        self.ops = resolve(self.limits, swap, interpret, replays=not enforce_eager)
        trim()
        weights = load_weights(self.arch, tensors, self.dtype, self.device, weight_codes)
        with torch.inference_mode():
            runner_args = Model(self.arch, weights, self.ops, max_len), self.ops, 1, block_size, max_num_seqs, max_len
            speculator = build(self.speculation, draft_source, runner_args, self.limits, swap, interpret)
            self.runner = speculator.runner if speculator else ModelRunner(*runner_args)
            trim()
            num_blocks = self._allocate(num_kv_blocks, enforce_eager, pdl, draft_source.arch)
        self.scheduler = Scheduler(
            BlockManager(num_blocks, block_size, prefix_caching and study.kv_cache),
            *(max_num_seqs, max_num_batched_tokens, prefill_chunk or step_tokens, chunking, study.continuous_batching),
        )
        overlap = self.device.type == "cuda" and speculator is None if overlap is None else overlap
        core_class = Core if study.kv_cache else RecomputingCore
        self.core = core_class(self.scheduler, self.runner, overlap and study.kv_cache, speculator)
        self._seed, self._next_id = seed, 0

    def _allocate(self, num_kv_blocks: int | None, enforce_eager: bool, pdl: bool, beside: Architecture | None) -> int:
        """Allocates the KV cache and, on a GPU, records the decode graphs.  Returns the number of cache pages."""
        graphs = None if enforce_eager else self.runner.decode_graphs()
        dummy_step = partial(self.runner.rehearse, self.limits.max_rows, self.limits.max_drawn)
        dummy_steps: list[Callable[[], object]] = [
            dummy_step,
            *([graphs.step] if isinstance(graphs, DecodeGraphs) else []),
        ]
        num_blocks = kv_cache_blocks(self.limits, dummy_steps, num_kv_blocks, beside)
        self.runner.allocate(num_blocks)
        if isinstance(graphs, DecodeGraphs):
            with dependent_launches(pdl):
                # One pool of memory for all graphs, which never run at the same time.
                graphs.record(partial(record_graph, torch.cuda.graph_pool_handle()))
        self.runner.graphs = graphs
        return num_blocks

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, arrival_s: float | None = None) -> int:
        """Queues a prompt and returns its request id.  Raises `ValueError` if the engine cannot serve the prompt."""
        return self.submit(prompt, _one(params), arrival_s)[0].request_id

    def submit(self, prompt: Prompt, params: SamplingParams, arrival_s: float | None = None) -> list[EngineSequence]:
        """Queues a prompt and returns its `params.n` sequences (answers).  Raises `ValueError` like `add_request`."""
        answers = self._answers(prompt, params, arrival_s)
        self.scheduler.submit(answers[0])
        return answers

    def abort(self, request_id: int) -> bool:
        """Drops a request, even if its computation has begun.  Returns False if the request has already ended."""
        sequences = [sequence for sequence in self.core.unfinished() if sequence.request_id == request_id]
        self.core.abort(sequences)
        return bool(sequences)

    def _sequence(self, prompt: Prompt, params: SamplingParams, arrival_s: float | None = None) -> EngineSequence:
        arrival_s = time.perf_counter() if arrival_s is None else arrival_s
        params = with_settings(params, self._set)
        ids = self.tokenizer.encode(prompt)
        if len(ids) >= (max_length := self.max_model_len):
            raise ValueError(f"prompt: expected fewer tokens than max_model_len, which is {max_length}, got {len(ids)}")
        tokens_by_option = {"prompt": ids, "logit_bias": params.logit_bias, "stop_token_ids": params.stop_token_ids}
        for name, tokens in tokens_by_option.items():
            if tokens and not 0 <= min(tokens) <= max(tokens) < (vocab_size := self.arch.vocab_size):
                wrong_token = next(token for token in tokens if not 0 <= token < vocab_size)
                raise ValueError(f"{name}: expected token ids below {vocab_size}, got {wrong_token}")
        request_id = self._next_id
        seed = params.seed if params.seed is not None else (self._seed << 32 | request_id) % 2**63
        special_tokens = self.tokenizer.special
        stop_ids = {*params.stop_token_ids, *(special_tokens[text] for text in params.stop if text in special_tokens)}
        stop_ids |= frozenset() if params.ignore_eos else self._stop_ids
        final_length = min(len(ids) + params.max_tokens, self.max_model_len)
        sequence = EngineSequence(request_id, ids, len(ids), params, seed, frozenset(stop_ids), final_length, arrival_s)
        self.scheduler.check(sequence)
        self._next_id += 1
        if params.stop:
            sequence.stopping = StopText(params.stop, self.tokenizer.stream(), params.min_tokens)
        return sequence

    def _answers(self, prompt: Prompt, params: SamplingParams, arrival_s: float | None = None) -> list[EngineSequence]:
        """Makes the `params.n` sequences of one prompt.  The first sequence lists the other sequences in `siblings`."""
        sequence = self._sequence(prompt, params, arrival_s)
        seeds = (None if params.seed is None else (params.seed + i) % 2**63 for i in range(1, params.n))
        sequence.siblings = [self._sequence(prompt, replace(params, seed=seed), sequence.arrival_s) for seed in seeds]
        return [sequence, *sequence.siblings]

    @property
    def has_work(self) -> bool:
        """Returns whether any request has not ended yet."""
        return self.core.has_work

    @torch.inference_mode()
    def step(self) -> list[EngineSequence]:
        """Runs one step.  Returns a list with one entry for each new token: the sequence that got this token."""
        return self.core.step()

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[TokenEvent]:
        """Yields a `TokenEvent` for each token of the answer, with the text that the token completes."""
        params = _one(params)
        (sequence,) = self.submit(prompt, params)
        stop_text, times_s = StopText(params.stop, self.tokenizer.stream(), params.min_tokens), list[float]()
        try:
            # A step of another stream may have made tokens for this request too; each token is delivered once.
            while sequence.finish_reason is None or len(times_s) < len(sequence.output_ids):
                if len(times_s) == len(sequence.output_ids):
                    self.step()
                    continue
                token = sequence.output_ids[len(times_s)]
                is_last_token = sequence.finish_reason is not None and len(times_s) + 1 == len(sequence.output_ids)
                new_text = stop_text.piece(token, is_last_token)
                times_s.append(time.perf_counter())
                output = self._output([sequence], times_s) if is_last_token else None
                yield TokenEvent(sequence.request_id, len(times_s) - 1, token, times_s[-1], new_text, output)
        finally:
            self.core.abort([sequence])

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Returns one result per prompt, in order.  `prompts` is one prompt or a list of prompts.

        A prompt is a string, a list of chat messages (`{"role": ..., "content": ...}`) or a list of token ids.
        `params` is one object for all prompts, or a list with one object per prompt."""
        prompt_list = _as_list(prompts)
        params_list = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(prompt_list)
        if len(params_list) != len(prompt_list):
            raise ValueError(f"params: expected one or {len(prompt_list)}, got {len(params_list)}")
        # All sequences are made before any is queued, so that a bad prompt queues nothing.
        answers = [self._answers(prompt, settings) for prompt, settings in zip(prompt_list, params_list, strict=True)]
        for first_sequence, *_ in answers:
            self.scheduler.submit(first_sequence)
        sequences = [sequence for prompt_answers in answers for sequence in prompt_answers]
        token_times_s: dict[int, list[float]] = {sequence.request_id: [] for sequence in sequences}
        try:
            while any(sequence.finish_reason is None for sequence in sequences):
                step_sequences = self.step()
                now_s = time.perf_counter()
                for sequence in step_sequences:
                    if sequence.request_id in token_times_s:
                        token_times_s[sequence.request_id].append(now_s)
        finally:
            self.core.abort(sequences)
        return [self._output(prompt_answers, token_times_s[prompt_answers[0].request_id]) for prompt_answers in answers]

    def _output(self, answers: list[EngineSequence], times: list[float]) -> RequestOutput:
        first_sequence = answers[0]
        return RequestOutput(
            first_sequence.request_id,
            first_sequence.token_ids[: first_sequence.num_prompt_tokens],
            [self._completion(sequence) for sequence in answers],
            Timeline(first_sequence.arrival_s, tuple(times)),
        )

    def _completion(self, sequence: EngineSequence) -> Completion:
        assert sequence.finish_reason is not None, "every sequence has run to its end"
        output_ids, stop_text = sequence.output_ids, sequence.stopping
        if stop_text is not None:
            stop_text.end()
        text = self.tokenizer.decode(output_ids) if stop_text is None else stop_text.text
        logprobs = None if sequence.params.logprobs is None else sequence.logprobs
        return Completion(text, output_ids, sequence.finish_reason, logprobs)


def _one(params: SamplingParams | None) -> SamplingParams:
    if params is not None and params.n != 1:
        raise ValueError(f"n: expected 1 where one answer comes token by token, got {params.n}")
    return params or SamplingParams()


def _as_list(prompts: Any) -> list[Any]:
    if not isinstance(prompts, Sequence) or not prompts:
        raise ValueError(f"prompts: expected a prompt or a list of prompts, got {prompts!r}")
    is_single = isinstance(prompts, str) or is_chat(prompts) or all(isinstance(token_id, int) for token_id in prompts)
    return [prompts] if is_single else list(prompts)
