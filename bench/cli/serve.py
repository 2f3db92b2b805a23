"""Defines the command `serve`, which runs the engine behind OpenAI's HTTP interface."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Annotated

import typer

from rooflab.bench import show
from rooflab.bench.base.extras import need
from rooflab.bench.base.plain import Json
from rooflab.bench.base.statuses import ExitStatus
from rooflab.bench.cli import option
from rooflab.bench.cli.app import app
from rooflab.bench.cli.names import parse_swaps


@app.command()
@option.grouped
def serve(
    *,
    model: Annotated[str, typer.Argument(help="smollm2-135m, a GGUF file, a Hugging Face folder, or a preset.")],
    dummy: Annotated[bool, typer.Option("--dummy", help="Use random weights; a token's text is its id.")] = False,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all of the machine's.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any free port.")] = 8000,
    name: Annotated[str | None, typer.Option("--name", help="The name that requests give as `model`.")] = None,
    api_key: Annotated[bool, typer.Option("--api-key", help="Require the key in $ROOFLAB_API_KEY.")] = False,
    allow_origin: Annotated[
        list[str] | None, typer.Option(help="A site whose pages may send requests, as https://chat.example; *: any.")
    ] = None,
    dtype: option.EngineDtype = None,
    device: option.Device = None,
    swap: option.Swap = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of the engine on a CPU.")] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="The most sequences in the batch.")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="The most tokens of a step.")] = 2048,
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Longest context; without it, the model's.")] = None,
    num_kv_blocks: Annotated[
        int | None, typer.Option(min=1, help="Pages of the KV cache; without it, all pages that fit in memory.")
    ] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a page of the KV cache.")] = 16,
    enforce_eager: option.Eager = False,
    drafts: option.Speculative,
    seed: option.Seed = 0,
    max_queue: Annotated[int, typer.Option(help="The most answers that wait; one more gets status 429.")] = 256,
    max_tokens: Annotated[int | None, typer.Option(help="The most tokens of an answer.")] = None,
    max_body_bytes: Annotated[int, typer.Option(help="The most bytes in the body of a request.")] = 1 << 20,
    max_head_bytes: Annotated[int, typer.Option(help="The most bytes in a request's line and headers.")] = 1 << 16,
    timeout_s: Annotated[float, typer.Option(help="Seconds from a request's arrival to its last token.")] = 600.0,
    receive_s: Annotated[float, typer.Option(help="Seconds in which a request must have arrived.")] = 60.0,
    keep_alive_s: Annotated[int, typer.Option(help="Seconds after which an idle connection is closed.")] = 120,
    drain_s: Annotated[float, typer.Option(min=0.0, help="Seconds that answers may take after SIGTERM.")] = 30.0,
    otlp_endpoint: Annotated[
        str | None, typer.Option(envvar="OTEL_EXPORTER_OTLP_ENDPOINT", help="Send traces there (OTLP over HTTP).")
    ] = None,
    replicas: Annotated[
        int | None, typer.Option(help="Number of engines, which Ray Serve runs behind one address.")
    ] = None,
    max_replicas: Annotated[int | None, typer.Option(help="The most engines; Ray starts more under load.")] = None,
    ray: Annotated[str | None, typer.Option(help="Address of the Ray cluster; auto: the local one.")] = None,
) -> None:
    """Serve a model with OpenAI's HTTP interface, /metrics for Prometheus, and a page that shows the engine's state."""
    if replicas is None and (max_replicas is not None or ray is not None):
        raise ValueError(f"{'ray' if max_replicas is None else 'max_replicas'}: expected --replicas with it")
    need("serve", "engine", "report")
    import uvloop

    from rooflab.bench.learn.learn_page import render
    from rooflab.engine.serve.client import EngineDied
    from rooflab.engine.serve.limits import Limits
    from rooflab.engine.serve.server import serve as run

    key = os.environ.get("ROOFLAB_API_KEY")
    if api_key and not key:
        raise ValueError("api_key: expected the key in $ROOFLAB_API_KEY, which is not set")
    engine_options = {
        "model": model, "dummy": dummy, "dtype": dtype, "device": device, "swap": parse_swaps(swap or []),
        "max_num_seqs": max_num_seqs, "max_num_batched_tokens": max_num_batched_tokens, "max_model_len": max_model_len,
        "num_kv_blocks": num_kv_blocks, "block_size": block_size, "enforce_eager": enforce_eager, "seed": seed,
        **asdict(drafts),
    }  # fmt: skip
    server_limits = Limits(
        max_queue, max_body_bytes, max_tokens, timeout_s, key if api_key else None, tuple(allow_origin or ()),
        max_head_bytes, receive_s, keep_alive_s,
    )  # fmt: skip
    common_options: dict[str, Json] = {
        "host": host, "port": port, "name": name, "limits": server_limits, "threads": threads, "drain_s": drain_s,
        "say": show.line,
    }  # fmt: skip
    show.line(f"loading {model}")
    if replicas is not None:
        _replicas(engine_options, replicas, max_replicas, ray, otlp_endpoint, common_options)
        return
    try:
        pages = {"/learn": render(live=True)}
        uvloop.run(run(engine_options, otlp_endpoint=otlp_endpoint, pages=pages, **common_options))
    except EngineDied as died:
        show.error(f"rooflab: {died}")
        raise typer.Exit(ExitStatus.INCORRECT) from died


def _replicas(
    options: dict[str, Json],
    count: int,
    most: int | None,
    cluster: str | None,
    otlp: str | None,
    common: dict[str, Json],
) -> None:
    from rooflab.engine.serve.extras.replicas import Replicas, serve_replicas

    if otlp:
        raise ValueError("otlp_endpoint: expected one engine with it, got replicas, which Ray traces")
    if common["port"] == 0:
        raise ValueError("port: expected a number above 0 with replicas, got 0")
    serve_replicas(options, Replicas(count, most, cluster), **common)
