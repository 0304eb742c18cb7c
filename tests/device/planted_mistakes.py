"""Does the rehearsal see mistakes that only a GPU would show? Each of these is planted, and its check has to fail.

python tests/device/planted_mistakes.py        # an object: what each check said without and with a mistake
"""

import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools/device_check"), str(Path(__file__).parent)]

import fake_cuda  # noqa: E402, F401 before torch

# isort: split
import device_on_trial as trial  # noqa: E402
import torch  # noqa: E402
from device_runner import Setting  # noqa: E402
from torch.distributed.checkpoint import FileSystemWriter  # noqa: E402

from grpo_fn.shell.background_worker import BackgroundWorker  # noqa: E402
from grpo_fn.shell.checkpoint import tensor_shards  # noqa: E402
from grpo_fn.shell.model import attention, logprob_model, packed_input  # noqa: E402
from grpo_fn.shell.sampler.local import decode_step, kv_cache  # noqa: E402

Change = tuple[Any, str, Callable[[Any], Any]]  # where, which name, what was there to what is there now


class Mistake(NamedTuple):
    """Put in by hand."""

    what: str
    check: Callable[[Setting], None]
    changes: list[Change]


def a_wait_while_drawing(draw: Any) -> Any:
    return lambda live, *rest: (int(live.drawn.max()), draw(live, *rest))[1]


def seats_of_the_capture(set_row_slots: Any) -> Any:
    return lambda engine, shape, found: None if shape in engine.tables else set_row_slots(engine, shape, found)


def columns_of_the_capture(places: Any) -> Any:
    def frozen(self: Any, heads: int) -> Any:
        return places(self, heads) - (self.length - self.start).repeat_interleave(heads) + first[0]

    first = [0]
    return frozen


def lengths_at_capture(operator: Any) -> Any:
    def called(*given: Any) -> torch.Tensor:
        known = given[8].data_ptr(), len(given[8])
        if torch.cuda.is_current_stream_capturing():
            given = (*given[:8], lengths.setdefault(known, given[8].detach()), *given[9:])
        else:
            lengths[known] = given[8].clone()
        return operator(*given)

    lengths: dict[tuple[int, int], torch.Tensor] = {}
    return called


def unwritten(of: Any) -> Any:
    def fresh(self: Any, layer: int, key: torch.Tensor, value: torch.Tensor) -> Any:
        if layer not in self.layers:
            self.layers[layer] = tuple(
                x.new_empty(self.count, x.shape[1], self.columns, x.shape[3]) for x in (key, value)
            )
        return of(self, layer, key, value)

    return fresh


def of_64_bits(ragged: Any) -> Any:
    return property(lambda self: (lambda rows: rows._replace(queries=rows.queries.long()))(ragged.func(self)))


def a_stream_each(call: Any) -> Any:
    def capture(self: Any, step: Any) -> Any:
        self.side = torch.cuda.Stream()
        return call(self, step)

    return capture


def a_wait_each_row(by_reading: Any) -> Any:
    return lambda tokens, mask, *rest, **knobs: (
        [int(row.sum()) for row in mask],
        by_reading(tokens, mask, *rest, **knobs),
    )[1]


def copying_ahead(init: Any) -> Any:
    return lambda self, folder: FileSystemWriter.__init__(self, folder)


def without_device(init: Any) -> Any:
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        with patch.object(torch.cuda, "is_initialized", lambda: False):
            init(self, *args, **kwargs)

    return made


def on_the_cpu(mask: Any) -> Any:
    return lambda self, *args: mask(self, *args).cpu()


def idle(_: Any) -> Any:
    return lambda *_, **__: None


MISTAKES = [
    Mistake("a wait in a captured step", trial.decoding, [(decode_step, "draw", a_wait_while_drawing)]),
    Mistake("a mask on the CPU", trial.decoding_in_products, [(kv_cache.DecodeAttention, "mask", on_the_cpu)]),
    Mistake(
        "seats that a replay does not see",
        trial.other_seats,
        [(decode_step.DecodeEngine, "set_row_slots", seats_of_the_capture)],
    ),
    Mistake(
        "columns of the capture in every replay",
        trial.decoding,
        [(kv_cache.DecodeAttention, "places", columns_of_the_capture)],
    ),
    Mistake(
        "lengths that a replay does not see", trial.decoding, [(decode_step, "split_kv_attention", lengths_at_capture)]
    ),
    Mistake("memory that nothing has written", trial.decoding_in_products, [(kv_cache.KVCache, "of", unwritten)]),
    Mistake(
        "graphs of weights that have moved", trial.moved_weights, [(decode_step, "addresses", lambda _: lambda m: (0,))]
    ),
    Mistake("projections joined before the weights moved", trial.moved_weights, [(decode_step, "relink", idle)]),
    Mistake("cu_seqlens of 64 bits", trial.packed, [(attention.Layout, "ragged_rows", of_64_bits)]),
    Mistake(
        "flash attention that adds up in any order",
        trial.the_same_gradients_again,
        [(attention, "strict_determinism", lambda _: nullcontext)],
    ),
    Mistake("a stream for each capture", trial.one_side_stream, [(decode_step.CudaGraph, "__call__", a_stream_each)]),
    Mistake("a failed capture's stream stays", trial.failed_capture, [(torch.cuda, "set_stream", idle)]),
    Mistake("the device is not set", trial.second_card, [(torch.cuda, "set_device", idle)]),
    Mistake(
        "a saving thread that asks for a stream, and has no device",
        trial.second_card,
        [(tensor_shards._Writer, "__init__", copying_ahead), (BackgroundWorker, "__init__", without_device)],
    ),
    Mistake("a wait for each row", trial.cutting, [(packed_input, "by_reading", a_wait_each_row)]),
    Mistake(
        "graphs dropped in every step",
        trial.kept_graphs,
        [(decode_step.DecodeEngine, "free_bytes", lambda _: lambda *_: 0)],
    ),
    Mistake(
        "sampled logits rounded to bfloat16",
        trial.sampled_logits,
        [(decode_step, "keep_logits_in_float32", idle)],
    ),
    Mistake(
        "logits rounded to bfloat16", trial.rounding, [(logprob_model, "_wide_products", lambda _: lambda x: False)]
    ),
]


def attempt(check: Callable[[Setting], None], setting: Setting, changes: list[Change]) -> str | None:
    """What the check says of the changes; None when it passes."""
    with ExitStack() as stack:
        for where, name, change in changes:
            stack.enter_context(patch.object(where, name, change(vars(where)[name])))
        try:
            check(setting)
        except Exception as error:
            if not changes:
                traceback.print_exc()
            return f"{type(error).__name__}: {str(error)[:300]}"
    return None


def main() -> None:
    """Every check as it is, then with each mistake."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        setting = Setting(device="cuda", tiny=True, scratch=scratch)
        clean = {check.__name__: attempt(check, setting, []) for check in trial.CHECKS}
        planted = {one.what: attempt(one.check, setting, one.changes) for one in MISTAKES}
    print(json.dumps({"clean": clean, "planted": planted}), flush=True)


if __name__ == "__main__":
    import os

    main()
    os._exit(0)
