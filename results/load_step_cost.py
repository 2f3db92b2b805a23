"""What HTTP costs a step of the engine: the same batches asked of one engine directly, and by a client over HTTP.

    python results/load_step_cost.py --model smollm2-135m --batch 16 --rounds 8

The engine's process, the server's and the client's are three; the engine has one thread.  Rounds take turns, so that
both ways meet the same machine.  Steps that count decode the whole batch and no prompt.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile

import numpy as np
import uvicorn

from rooflab.engine.sequence import SamplingParams
from rooflab.engine.serve.api import Service
from rooflab.engine.serve.client import Engine, Inbox
from rooflab.engine.serve.limits import Limits
from rooflab.engine.serve.server import bound, config_of, service_of

PROMPT = 32
"""Tokens of each prompt."""


async def measure(model: str, batch: int, tokens: int, rounds: int) -> dict[str, list[np.ndarray]]:
    """Milliseconds of the steps that count of each round, `direct` and by `http`."""
    engine = Engine({"model": model, "max_num_seqs": batch, "max_model_len": PROMPT + tokens}, threads=1)
    service = await service_of(engine, {"model": model}, None, Limits())
    socket = bound("127.0.0.1", 0)
    server = uvicorn.Server(config_of(service, "127.0.0.1"))
    serving = asyncio.create_task(server.serve([socket]))
    found: dict[str, list[np.ndarray]] = {"direct": [], "http": []}
    try:
        for number in range(rounds + 1):
            for way in found:
                first = engine.steps[-1].number if engine.steps else 0
                if way == "direct":
                    await _direct(service, batch, tokens, number)
                else:
                    await _http(f"http://127.0.0.1:{socket.getsockname()[1]}", batch, tokens, number)
                own = [line for line in engine.steps if line.number > first and not line.prompt_tokens]
                steps = [1e3 * (line.end_s - line.begin_s) for line in own if line.num_decodes == batch]
                if number:  # the first round warms up
                    found[way].append(np.array(steps))
    finally:
        server.should_exit = True
        await serving
        await engine.stop()
    return found


async def _direct(service: Service, batch: int, tokens: int, seed: int) -> None:
    draw, inbox = random.Random(seed), Inbox()
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    for _ in range(batch):
        await service.engine.submit([[draw.randrange(100, 1000) for _ in range(PROMPT)]], params, inbox)
    while service.engine.calls:
        await inbox.get()


async def _http(url: str, batch: int, tokens: int, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "url": url, "concurrency": batch, "num-prompts": batch, "input-len": PROMPT, "output-len": tokens,
            "seed": seed, "extra-body": '{"temperature": 0}', "out": folder,
        }  # fmt: skip
        given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        command = [sys.executable, "-m", "rooflab.bench", "load", *given, "--no-plots"]
        client = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        assert await client.wait() == 0, "the load failed"


def main() -> None:
    """The script."""
    parser = argparse.ArgumentParser(description="What HTTP costs a step of the engine.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args()
    found = asyncio.run(measure(given.model, given.batch, given.tokens, given.rounds))
    result: dict[str, object] = {}
    for q in (50, 99):
        direct, http = (np.array([np.percentile(own, q) for own in found[way]]) for way in ("direct", "http"))
        result[f"step_p{q}_ms"] = {
            "direct": round(float(np.median(direct)), 3),
            "http": round(float(np.median(http)), 3),
        }
        ratios = np.sort(http / direct)
        result[f"step_p{q}_ratio"] = {
            "median": round(float(np.median(ratios)), 3),
            "of_rounds": ratios.round(3).tolist(),
        }
    print(
        json.dumps(
            {**result, "steps": {way: sum(map(len, own)) for way, own in found.items()}}, indent=2, allow_nan=False
        )
    )


if __name__ == "__main__":
    main()
