"""What two cards of a host do together: gradients, rows, rates, and the end of a rank that has lost the other.

python tools/device_check --part cards        # starts this file once for each rank, as torchrun would start a run

On a CPU the ranks are two processes that talk over gloo.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from device_exact import OBJECTIVE, SPREAD, TEMPERATURE, asked, grads
from device_parts import GB, KEY, Bench, built, distance, full_float32, require, seconds
from device_runner import Figure, LeftOut, Setting
from device_shapes import MIDDLE, folder, sized
from torch import Tensor
from torch.func import grad_and_value

from grpo_fn.algo.step import AT_THE_START, UNMOVED
from grpo_fn.core import prng
from grpo_fn.core.batch import count, trim_rows
from grpo_fn.core.types import Batch
from grpo_fn.shell.world import EXIT_LOST, GRACE, LostRank, World, alone, find_device, join_world, leave_lost

RANKS = 2
JOINING = 60.0  # seconds for the ranks to find one another
ABORTED = -6  # of NCCL's own watchdog, where a connection breaks: docs/running/cluster.md, "When a rank dies"
WHERE = "step 2, train"


class Rank(NamedTuple):
    """How a rank ended."""

    found: Any  # what its work returned; None where it did not
    code: int
    said: str  # on stdout and stderr


def two_cards(setting: Setting) -> None:
    """Raise LeftOut where there are fewer."""
    if setting.device == "cuda" and torch.cuda.device_count() < RANKS:
        raise LeftOut(f"got {torch.cuda.device_count()} card, wanted {RANKS}")


def model_folder(setting: Setting) -> str:
    """Of the model that all ranks load."""
    return folder(setting, sized(setting, MIDDLE), spread=SPREAD, dtype=torch.float32)


# -- the checks


def together(setting: Setting) -> list[Figure]:
    """Gradients of two ranks against the functional oracle on the CPU, a step's rows against those of one, rates."""
    two_cards(setting)
    model = model_folder(setting)
    with full_float32():
        one = rows_of_a_step(build(setting, model, alone(find_device(setting.device, 0)), torch.float32))
    ranks = started(setting, "work", limit=120.0)
    for number, rank in enumerate(ranks):
        require(rank.found is not None, f"rank {number}: got exit code {rank.code}; {rank.said[-300:]}")
    first, second = (rank.found for rank in ranks)
    require(first["tokens"] == second["tokens"], "got other rows on rank 1 than on rank 0, wanted the same on both")
    same = in_common(first["tokens"], one)
    require(same >= 0.99, f"rows: got {same:.4f} of the tokens of one card from two")
    require(first["float32"] <= 1e-5, f"float32: got gradients {first['float32']:.2g} of the largest entry apart")
    require(first["bfloat16"] <= 0.03, f"bfloat16: got gradients {first['bfloat16']:.2g} of the norm apart")
    return [
        Figure("float32, gradients from the oracle's, of the largest entry", first["float32"], at_most=1e-5),
        Figure("bfloat16, of the norm", first["bfloat16"], at_most=0.03),
        Figure("tokens that one card draws, too", same, at_least=0.999),
        *(Figure(name, rate, "GB/s") for name, rate in first["rates"].items()),
    ]


def stopped(setting: Setting) -> list[Figure]:
    """The other rank stands still, in groups of a mesh: this one leaves after the deadline, naming step and phase."""
    return lost(setting, "stopped", codes={EXIT_LOST}, within=deadline(setting) + 4 * GRACE)


def gone(setting: Setting) -> list[Figure]:
    """The other rank's process ends: this one leaves with a documented code, at once or after the deadline."""
    broken = {ABORTED} if setting.device == "cuda" else set()
    return lost(setting, "gone", codes={EXIT_LOST} | broken, within=deadline(setting) + 4 * GRACE)


def lost(setting: Setting, job: str, *, codes: set[int], within: float) -> list[Figure]:
    """Start it, and look how rank 0 ends and when."""
    two_cards(setting)
    model_folder(setting)
    left, _ = started(setting, job, limit=JOINING + within, until_first=True)
    marks = [line for line in left.said.splitlines() if line.startswith("lost at ")]
    require(bool(marks), f"{job}: got exit code {left.code} before the other rank was lost; {left.said[-300:]}")
    waited = ended_at(setting, job) - float(marks[0].split()[-1])
    require(left.code in codes, f"{job}: got exit code {left.code}, wanted {sorted(codes)}; {left.said[-300:]}")
    if left.code == EXIT_LOST:
        require(WHERE in left.said, f"{job}: got no word of {WHERE!r} from the rank that is left; {left.said[-300:]}")
    require(waited <= within, f"{job}: got a rank that left after {waited:.1f} s, wanted at most {within:g}")
    return [Figure("exit code", float(left.code)), Figure("left after", waited, "s", at_most=within)]


def deadline(setting: Setting) -> float:
    """Seconds that a rank waits for the other where one is lost."""
    return 3.0 if setting.tiny else 20.0


def in_common(one: list[list[int]], other: list[list[int]]) -> float:
    """The share of the places at which both have the same token."""
    width = max(len(row) for row in (*one, *other))
    a, b = (torch.tensor([row + [-1] * (width - len(row)) for row in rows]) for rows in (one, other))
    there = (a >= 0) | (b >= 0)
    return float((a == b)[there].float().mean())


# -- processes


def started(setting: Setting, job: str, *, limit: float, until_first: bool = False) -> list[Rank]:
    """Both ranks, from their start to their end; with `until_first` the second is ended with the first."""
    place = Path(setting.scratch) / f"cards-{job}"
    place.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = [launched(setting, job, rank, port, place) for rank in range(RANKS)]
    until = time.monotonic() + limit
    try:
        for process in running[:1] if until_first else running:
            process.wait(max(0.0, until - time.monotonic()))
            (place / f"ended-{process.args[-1]}").write_text(str(time.time()))
    except subprocess.TimeoutExpired:
        pass  # its code says so
    finally:
        for process in running:
            process.kill()
            process.wait()
    return [outcome(place, rank, process.returncode) for rank, process in enumerate(running)]


def launched(setting: Setting, job: str, rank: int, port: int, place: Path) -> subprocess.Popen:
    """The process of a rank."""
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PYTHONPATH": os.pathsep.join(sys.path)}
    env |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS), "RANK": str(rank), "LOCAL_RANK": str(rank)}
    argv = [sys.executable, __file__, json.dumps(asdict(setting)), job, str(place), str(rank)]
    with open(place / f"said-{rank}", "wb") as said:
        return subprocess.Popen(argv, env=env, stdout=said, stderr=subprocess.STDOUT)


def outcome(place: Path, rank: int, code: int) -> Rank:
    """What the rank has left there."""
    found = place / f"found-{rank}.json"
    said = (place / f"said-{rank}").read_text(errors="replace")
    return Rank(json.loads(found.read_text()) if found.is_file() else None, code, said)


def ended_at(setting: Setting, job: str) -> float:
    """Rank 0's, in seconds since the epoch."""
    path = Path(setting.scratch) / f"cards-{job}" / "ended-0"
    require(path.is_file(), f"{job}: got a rank that still waits, wanted it to leave")
    return float(path.read_text())


# -- what a rank does


def build(setting: Setting, model: str, world: World, dtype: torch.dtype, **changed: object) -> Bench:
    """The policy of a rank."""
    return built(setting, model, dtype, temperature=TEMPERATURE, world=world, **changed)


def rows_of_a_step(bench: Bench) -> list[list[int]]:
    """The tokens of every row of a whole GRPO step."""
    sampler = bench.sampler(prompt_tokens=5, new_tokens=8, max_rows=12)
    key = prng.key(KEY, device="cpu")
    experience, _, figures = bench.step(
        sampler, AT_THE_START, prompts=4, group_size=3, key=key, span=bench.world.talking
    )
    norm = figures["loss/grad_norm"]
    require(0 < norm < float("inf"), f"got a gradient norm of {norm}, wanted a finite one above 0")
    batch = experience.batch
    return [row[mask].tolist() for row, mask in zip(batch.tokens.cpu(), batch.mask.cpu(), strict=True)]


def trained(bench: Bench, batch: Batch) -> dict[str, Tensor]:
    """The batch's gradients, whole, from this rank's and the others' micro-batches."""
    rows_of_each = bench.policy.split_rows(batch)
    bench.policy.set_accumulation_steps(len(rows_of_each))
    for rows in rows_of_each:
        micro = trim_rows(batch, rows)
        scores, pullback = bench.policy.vjp(micro)

        def loss(scores: Any, micro: Batch = micro) -> Any:
            return OBJECTIVE(scores, batch=micro, totals=count(batch), gains=UNMOVED)

        signal, _ = grad_and_value(loss, has_aux=True)(scores)
        pullback(signal)
    return grads(bench)


def work(world: World, setting: Setting) -> dict[str, Any]:
    """Gradients, rows and rates."""
    model = model_folder(setting)
    batch, oracle, _ = asked(setting, model)
    batch = Batch(*(x.to(world.device) for x in batch))
    with full_float32():
        single, _ = distance(trained(build(setting, model, world, torch.float32), batch), oracle.grads)
        tokens = rows_of_a_step(build(setting, model, world, torch.float32))
    _, half = distance(trained(build(setting, model, world, torch.bfloat16), batch), oracle.grads)
    return {"float32": single, "bfloat16": half, "tokens": tokens, "rates": rates(world, tiny=setting.tiny)}


def rates(world: World, *, tiny: bool) -> dict[str, float]:
    """GB/s that a rank gets of another's weights, and gives of its gradients."""
    numbers = 2**10 if tiny else 2**28
    part = torch.ones(numbers, device=world.device)
    whole = torch.ones(world.size * numbers, device=world.device)
    calls = {
        "all-gather": lambda: dist.all_gather_into_tensor(whole, part),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(part, whole),
    }
    found = {}
    for name, call in calls.items():
        call()
        took = seconds(world.device.type, call, times=2 if tiny else 5)
        found[name] = (world.size - 1) * 4 * numbers / took / GB
    return found


def losing(world: World, setting: Setting, end: Callable[[], object]) -> None:
    """Two updates; before the second the last rank is lost. Two copies of the model, so that groups are a mesh's."""
    world.deadline = deadline(setting)
    bench = build(setting, model_folder(setting), world, torch.float32, dp_replicate=2, dp_shard=1)
    batch = Batch(*(x.to(world.device) for x in asked(setting, model_folder(setting)).batch))
    for step in (1, 2):
        world.where = lambda step=step: f"step {step}, train"
        if step == 2:
            print("lost at", time.time(), flush=True)
            if world.rank == world.size - 1:
                end()
        trained(bench, batch)
        bench.policy.update()


JOBS: dict[str, Callable[[World, Setting], Any]] = {
    "work": work,
    "stopped": lambda world, setting: losing(world, setting, lambda: time.sleep(10 * JOINING)),
    "gone": lambda world, setting: losing(world, setting, lambda: os._exit(9)),
}


def main(described: str, job: str, place: str, rank: str) -> None:
    """A rank's process: its work, and what it found."""
    setting = Setting(**json.loads(described))
    world = join_world(f"cuda:{rank}" if setting.device == "cuda" else "cpu", deadline=JOINING)
    try:
        found = JOBS[job](world, setting)
    except LostRank as error:
        error.add_note(world.where())
        leave_lost(error, then="as was meant")
    (Path(place) / f"found-{rank}.json").write_text(json.dumps(found))
    world.leave()


if __name__ == "__main__":
    main(*sys.argv[1:])
