"""Launches and waits of one GRPO step on the fake device, by phase, held against a stored budget.

    python tests/device/count_step.py                  # prints what was counted
    python tests/device/count_step.py --write          # and makes it the budget

torch.compile is off, as there is no compiler for the device: operators are counted as they are written.
A change that adds a wait, a graph or a stream fails the test of it; one that means to, or saves some, writes the budget
anew and says in its message what for.
"""

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools/device_check"), str(Path(__file__).parent)]
os.environ["TORCH_COMPILE_DISABLE"] = "1"  # before torch, which reads it once

import fake_cuda as fake  # noqa: E402 before torch

# isort: split
import device_step  # noqa: E402
import torch  # noqa: E402
from count_step_budget import BUDGET  # noqa: E402
from device_decode import SPREAD, Asking, context, sample  # noqa: E402
from device_parts import built, local  # noqa: E402
from device_runner import Setting  # noqa: E402
from device_shapes import TOY, folder  # noqa: E402

WORK = device_step.Work(prompts=4, size=4, prompt=6, new=20, steps=1)  # one step to warm up, one that counts
MICRO_TOKENS = 160  # a few micro-batches
ASKED = Asking(2, 3, 40)
LONG = Asking(4, 4, 160)  # more columns than two shapes of steps in matrix products have
LAYERS = (2, 4)


class PhaseCounts(device_step.Phases):
    """What each phase launches and waits for."""

    last: "PhaseCounts"

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.counts: dict[str, Counter[str]] = {}
        PhaseCounts.last = self

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """What happens inside counts towards `name`."""
        before = totals()
        yield
        self.counts[name] = self.counts.get(name, Counter()) + (totals() - before)


def totals() -> Counter[str]:
    """Of all so far; each kind of wait for itself."""
    waits = {f"wait: {what}": n for what, n in fake.backend.waits().items()}
    launches = sum(n for what, n in fake.backend.launches().items() if what != "replay")
    graphs = {"graphs": fake.CUDAGraph.made, "replays": fake.CUDAGraph.replayed, "streams": fake.Stream.made}
    return Counter({"launches": launches, **graphs, **waits})


def counted() -> dict[str, dict[str, int]]:
    """Of the second step, in bfloat16 under FSDP2, with a sampler of its own."""
    torch.set_num_threads(1)
    device_step.Phases = PhaseCounts
    with tempfile.TemporaryDirectory() as scratch:
        setting = Setting(device="cuda", tiny=True, scratch=scratch)
        bench = built(setting, folder(setting, TOY), torch.bfloat16, micro_tokens=MICRO_TOKENS)
        device_step.taken(bench, WORK, "cuda")
    return {phase: dict(sorted(found.items())) for phase, found in sorted(PhaseCounts.last.counts.items())}


def captured_step() -> dict[str, int]:
    """Operators of a captured decoding step in bfloat16, of each layer and besides, as they are written.

    The split-KV kernel, one operator, is two launches on a card.
    """
    found = []
    with tempfile.TemporaryDirectory() as scratch:
        setting = Setting(device="cuda", tiny=True, scratch=scratch)
        for layers in LAYERS:
            whole = context(setting, folder(setting, TOY._replace(layers=layers)), torch.bfloat16)
            sampler = local(whole, prompt_tokens=5, new_tokens=ASKED.new, max_rows=ASKED.prompts * ASKED.size)
            sample(sampler, asking=ASKED)
            (captured,) = {len(replay.__self__.captured) for replay in sampler.held.engine.run.replays.values()}
            found.append(captured)  # whatever the shape
    each, odd = divmod(found[1] - found[0], LAYERS[1] - LAYERS[0])
    if odd:
        raise ValueError(f"operators: got {found} in {LAYERS} layers, wanted as many in each")
    return {"launches a layer": each + 1, "launches besides": found[0] - LAYERS[0] * each}


def captured_shapes() -> dict[str, int]:
    """Graphs for one number of rows, the most, after two calls whose rows end at many lengths, few in the last column.

    How many numbers of rows there are follows from where rows end, and so from the rounding of torch's release.
    """
    with tempfile.TemporaryDirectory() as scratch:
        setting = Setting(device="cuda", tiny=True, scratch=scratch)
        whole = context(setting, folder(setting, TOY, spread=SPREAD), torch.bfloat16)
        sampler = local(whole, prompt_tokens=5, new_tokens=LONG.new, max_rows=LONG.prompts * LONG.size)
        for _ in range(2):
            sample(sampler, asking=LONG)
        rows = Counter(shape.rows for shape, _ in sampler.held.engine.run.replays)
        return {"graphs for one number of rows": max(rows.values(), default=0)}


def main() -> None:
    """Count; with --write, keep it."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    found = {**counted(), "decoding step": captured_step(), "decoding calls": captured_shapes()}
    if args.write:
        BUDGET.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)
