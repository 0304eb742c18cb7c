"""The root of `python -m grpo_fn.serve`: find a model as an evaluation does, load it, serve it until a signal comes."""

import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from grpo_fn.core.checks import check_positive
from grpo_fn.serve.endpoint import Endpoint, Served
from grpo_fn.shell.model import hf
from grpo_fn.shell.model.attention import check_attention
from grpo_fn.shell.sampler.interface import check_limits
from grpo_fn.shell.serving.decode_service import DecodeService
from grpo_fn.shell.serving.http_endpoint import JsonServer
from grpo_fn.shell.world import find_device
from grpo_fn.trainer.model_source import check_fits, load_located_model, locate
from grpo_fn.trainer.sections import Compute, Data, Sampling


class ServeRequest(NamedTuple):
    """What the command line asks for."""

    model: str
    name: str | None  # that requests give; None: the model's folder
    host: str
    port: int
    max_rows: int  # decoded at once
    max_tokens: int | None  # of a completion; None: sections.Sampling.max_new_tokens
    max_waiting: int  # rows and texts
    timeout: float  # seconds of a request


class LoadedService(NamedTuple):
    """A model that answers, its tokenizer, and what holds its weights."""

    service: DecodeService
    tokenizer: PreTrainedTokenizerBase
    path: str


def serve(request: ServeRequest, *, compute: Compute, sampling: Sampling, data: Data) -> int:
    """Serve a model over HTTP until SIGINT or SIGTERM.

    Raises ValueError, before any weights are loaded, for numbers, an address or a model that do not fit.
    """
    if not request.timeout > 0:
        raise ValueError(f"--timeout: got {request.timeout:g}, wanted seconds above 0")
    name = request.name or Path(request.model).absolute().name
    with ExitStack() as stack:
        server = stack.enter_context(closing(JsonServer(request.host, request.port)))
        limits = {"max_rows": request.max_rows, "max_tokens": request.max_tokens, "max_waiting": request.max_waiting}
        loaded = load_service(request.model, compute=compute, sampling=sampling, **limits)
        service = stack.enter_context(closing(loaded.service))
        stop = tuple(sampling.stop)
        served = Served(service, loaded.tokenizer, data.encode_prompt, stop, name, request.timeout)
        server.start(Endpoint(served).routes())
        print(f"serving {loaded.path} as {name} at {server.url}/v1", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print("ending: requests that are not answered yet get status 503", flush=True)
            service.close()  # first: the answers to what waits are written while the server ends
    return 0


def load_service(
    model: str,
    *,
    compute: Compute,
    sampling: Sampling,
    max_rows: int,
    max_tokens: int | None,
    max_waiting: int,
) -> LoadedService:
    """Load what a name means (see `model_source.locate`), as an evaluation does, and start its decoding thread.

    Raises ValueError, before any weights are loaded, for limits or a model that do not fit.
    """
    most = sampling.max_new_tokens if max_tokens is None else max_tokens
    check_positive(max_rows=max_rows, max_tokens=most, max_waiting=max_waiting)
    check_limits(sampling.stop)
    place, precision = find_device(compute.device, 0), hf.find_dtype(compute.dtype)
    check_attention(compute.attention, place, precision, deterministic=False)
    found = locate(model, warn=partial(print, file=sys.stderr))
    config = found.source.config()
    if found.checkpoint is not None:
        check_fits(found.checkpoint, config)
    disable_progress_bar()
    folder = found.source.folder()
    tokenizer = hf.load_tokenizer(folder)
    load: Callable[[], nn.Module] = partial(
        hf.load_model, folder, dtype=precision, device=place, attention=compute.attention
    )
    service = DecodeService(
        load_located_model(found, load),
        tokenizer,
        max_rows=max_rows,
        max_tokens=most,
        max_waiting=max_waiting,
        logits_chunk_elements=compute.logits_chunk_elements,
    )
    return LoadedService(service, tokenizer, found.path)
