"""Small checks on the fake device, each of which a planted mistake has to fail: it raises where something is wrong."""

import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import fake_cuda as fake

# isort: split
import torch
from device_decode import SPREAD, Asking, context, drawn, sample, uncached
from device_exact import repeats, rows, rows_of
from device_parts import built, local, problems, require
from device_runner import Setting
from device_shapes import TOY, folder
from fake_kernels import ANY_ORDER

from grpo_fn.core import prng
from grpo_fn.core.types import Batch
from grpo_fn.shell import world
from grpo_fn.shell.background_worker import BackgroundWorker
from grpo_fn.shell.checkpoint import tensor_shards
from grpo_fn.shell.model.logprob_model import linear_scores
from grpo_fn.shell.sampler.local import decode_step, local_sampler

ASKED = Asking(2, 3, 14)
LEAST = 4  # columns of the first shape, 64 in a run: rows of 14 tokens then meet several


def model_folder(setting: Setting) -> str:
    """Of a toy whose rows end at different lengths."""
    return folder(setting, TOY, spread=SPREAD, dtype=torch.float32)


def small_shapes(model: torch.nn.Module) -> decode_step.DecodeEngine:
    """The engine of a CUDA device, with more shapes than it would have."""
    engine = decode_step.build_engine(model)
    columns = partial(decode_step.graph_size, least=LEAST)
    engine.sizes = engine.sizes._replace(columns=columns, steps=4)
    return engine


def decoding(setting: Setting) -> None:
    """Captured steps of several shapes and seatings, slots filled again: the tokens of an uncached forward pass."""
    with several_shapes(), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # by which the sampler says that it does without
        found = drawn(setting, model_folder(setting), torch.float32, ASKED)
    for name in ("same", "again", "without", "fewer"):
        require(getattr(found, name) == 1.0, f"{name}: got {getattr(found, name):.3f} of the tokens, wanted all")
    require(found.most < 1e-4, f"log-probs: got {found.most:.2g} nats from the uncached")
    require(found.graphs > 2, f"graphs: got {found.graphs}, wanted several shapes")


def decoding_in_products(setting: Setting) -> None:
    """The same where the split-KV kernel cannot be had."""
    with patch.object(decode_step, "choose_split_kv", lambda model: None):
        decoding(setting)


def kernel_of_decoding(setting: Setting) -> None:
    """Steps are captured with the split-KV kernel: one launch in each layer, whatever its shape."""
    sampler = local(
        context(setting, model_folder(setting), torch.bfloat16), prompt_tokens=5, new_tokens=ASKED.new, max_rows=6
    )
    sample(sampler, asking=ASKED)  # asks the model whether it is fit, in matrix products
    sampler.rest()
    sampler.held.engine.drop()
    fake.backend.clear()
    sample(sampler, asking=ASKED)
    launched = fake.backend.launches()
    require(launched.get("grpo_fn::split_kv_attention", 0) > 0, "got steps without the split-KV kernel")
    require("aten::bmm.dtype" not in launched, "got steps that attend in matrix products")


@contextmanager
def several_shapes() -> Iterator[None]:
    """Within it, samplers have small shapes."""
    with patch.object(local_sampler, "build_engine", small_shapes):
        yield


def other_seats(setting: Setting) -> None:
    """Rows that sit elsewhere than at the capture, in steps of one shape: the log-probs of an uncached pass."""
    whole = context(setting, model_folder(setting), torch.float32)
    with several_shapes():
        captured = local(whole, prompt_tokens=5, new_tokens=10, max_rows=4)
        for seed in range(3):
            rollout = captured.sample(problems(0, 4), 3, key=prng.key(seed, device="cpu"))
            logp = uncached(captured.model, rollout).log_softmax(-1).gather(-1, rollout.tokens[:, 1:, None])[..., 0]
            apart = float((logp - rollout.logp_sampled[:, 1:])[rollout.mask[:, 1:]].abs().max())
            require(apart < 1e-4, f"key {seed}: got log-probs {apart:.2g} nats from the uncached")


def moved_weights(setting: Setting) -> None:
    """Weights that have moved to other addresses are those that the next rows are drawn with."""
    whole = context(setting, model_folder(setting), torch.float32)
    make = partial(local, whole, prompt_tokens=5, new_tokens=ASKED.new, max_rows=6)
    sampler = make()
    for _ in range(2):  # the second use of a shape is captured
        sample(sampler, asking=ASKED)
    require(len(sampler.held.engine.run.replays) > 0, "got no graphs")
    kept = [p.data for p in sampler.model.parameters()]  # or the new ones might take their place
    for p in sampler.model.parameters():
        p.data = p.data * 2.0
    again = sample(sampler, asking=ASKED)
    fresh = make()
    for p in fresh.model.parameters():
        p.data.mul_(2.0)
    wanted = sample(fresh, asking=ASKED)
    require(len(kept) > 0 and torch.equal(again.tokens, wanted.tokens), "got rows of the weights as they were")


def packed(setting: Setting) -> None:
    """Rows end to end in float32 and bfloat16."""
    rows(setting)


def the_same_gradients_again(setting: Setting) -> None:
    """Deterministic kernels, as a run asks for them: no kernel of attention adds up in any order."""
    bench = built(setting, model_folder(setting), torch.bfloat16)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        apart = repeats(setting, bench, on=True)
    odd = [str(one.message) for one in said if ANY_ORDER in str(one.message)]
    require(apart == 0.0 and not odd, f"got gradients {apart:.2g} apart, and {odd[:1]}, wanted 0 and no such warning")


def one_side_stream(setting: Setting) -> None:
    """Captures share one stream."""
    before = fake.Stream.made
    capture, x = decode_step.CudaGraph(), torch.zeros(3, device="cuda")
    for _ in range(3):
        capture(lambda: x.add_(1.0))
    made = fake.Stream.made - before
    require(made == 1, f"streams: got {made} for three captures, wanted 1")


def failed_capture(setting: Setting) -> None:
    """After a capture that failed the stream is the one of before."""
    x = torch.zeros(3, device="cuda")

    def step() -> None:
        x.add_(1.0)
        if torch.cuda.is_current_stream_capturing():  # a wait that no warm-up shows
            x.sum().item()

    before = torch.cuda.current_stream()
    try:
        decode_step.CudaGraph()(step)
    except (RuntimeError, decode_step.BrokenCapture):
        pass
    else:
        raise AssertionError("got a graph of a step that waits")
    now, before_ = torch.cuda.current_stream(), before
    fake.set_stream(before)
    require(now == before_, "got the side stream as the current one after a failed capture")


def second_card(setting: Setting) -> None:
    """A world on the second card does all there: what a graph captures, and what is saved in a thread."""
    before = torch.cuda.current_device()
    fake.backend.forget_used()
    try:
        there = world.join_world("cuda:1", deadline=1.0)
        x = torch.zeros(3, device=there.device)
        replay = decode_step.CudaGraph()(lambda: x.add_(1.0))
        was = fake.backend.on_host(x).clone()
        replay()
        require(bool((fake.backend.on_host(x) == was + 1.0).all()), "got a replay that does nothing")
        save_in_thread(x)
        require(fake.backend.used() == [1], f"cards: got {fake.backend.used()} in use, wanted [1]")
    finally:
        fake.backend.set_device(before)


def save_in_thread(x: torch.Tensor) -> None:
    """As checkpoints are."""
    plan = tensor_shards.assign_pieces([tensor_shards.local_save_plan({"x": x})])
    staged = tensor_shards.stage({"x": x}, plan.plans[0], {}, pin=True)
    worker = BackgroundWorker("saving", timeout=60.0)
    with tempfile.TemporaryDirectory() as path:
        written = worker.submit(tensor_shards.write_shards, Path(path), plan.plans[0], staged).result(60)
        worker.submit(tensor_shards.write_index, Path(path), plan.index, [written]).result(60)
        back = torch.zeros_like(x)
        tensor_shards.load_into_tensors(Path(path), {"x": back})
    worker.shutdown()
    require(torch.equal(back, x), "got other numbers from the checkpoint")


def cutting(setting: Setting) -> None:
    """Micro-batches are cut with a number of waits that does not grow with the rows."""
    bench = built(setting, model_folder(setting), torch.float32, micro_tokens=40)
    waits = []
    for size in (2, 12):
        tokens, mask = (x.to("cuda") for x in rows_of(TOY.vocabulary, groups=2, size=size, prompt=4, new=6))
        none = torch.zeros(mask.shape, device="cuda")
        batch = Batch(tokens, mask, none, none, none, none, none, torch.zeros_like(mask), mask.long())
        bench.policy.split_rows(batch)  # the model is asked once how it reads rows
        before = sum(fake.backend.waits().values())
        parts = bench.policy.split_rows(batch)
        waits.append(sum(fake.backend.waits().values()) - before - len(parts))  # each part is copied back
    require(waits[0] == waits[1], f"waits: got {waits[0]} for 4 rows and {waits[1]} for 24, wanted as many")


def rounding(setting: Setting) -> None:
    """Logits of a bfloat16 head, which lie far from 0, are not rounded before they are float32."""
    g = torch.Generator().manual_seed(4)
    hidden, weight = (4.0 * torch.randn(n, 32, generator=g).bfloat16() for n in (8, 64))
    target = torch.arange(8)
    wanted = (hidden.double() @ weight.double().T).log_softmax(-1)[target, target]
    there = [x.to("cuda") for x in (hidden, weight, target)]
    logp, _ = linear_scores(*there, temperature=1.0, elements=64 * 3)
    apart = float((logp.cpu() - wanted).abs().max())
    require(apart < 1e-3, f"log-probs: got {apart:.2g} nats from those of exact products")


def kept_graphs(setting: Setting) -> None:
    """Graphs stay over the training where it has space beside them, as its peak says, and go where it has none."""
    sampler = local(
        context(setting, model_folder(setting), torch.float32), prompt_tokens=5, new_tokens=ASKED.new, max_rows=6
    )

    def step() -> bool:
        sample(sampler, asking=ASKED)
        sampler.rest()
        with torch.no_grad():
            next(iter(sampler.model.parameters())).mul_(1.0)  # trained
        return sampler.held.engine.drawn is not None

    with patch.object(decode_step, "KEEP", 0.0):
        require([step(), step(), step()] == [False, True, True], "got graphs that go, wanted them kept from step 2 on")
    before = torch.cuda.get_per_process_memory_fraction()
    try:
        torch.cuda.set_per_process_memory_fraction(torch.cuda.max_memory_allocated() / fake.MEMORY)
        require(not step(), "got graphs that stay on a card without space for them")
    finally:
        torch.cuda.set_per_process_memory_fraction(before)


def sampled_logits(setting: Setting) -> None:
    """A bfloat16 model is sampled from logits in float32, and trained on its own."""
    sampler = local(
        context(setting, model_folder(setting), torch.bfloat16), prompt_tokens=5, new_tokens=ASKED.new, max_rows=6
    )
    for _ in range(2):  # the second time its head is already another
        sampler.held.model = None
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            sample(sampler, asking=ASKED)
    ids = torch.arange(8, device="cuda")[None]
    with torch.no_grad():
        logits = sampler.model(input_ids=ids).logits
    trained = sampler.model(input_ids=ids).logits
    require(logits.dtype is torch.float32, f"logits: got {logits.dtype}, wanted float32")
    require(torch.equal(logits.bfloat16(), trained), "got other logits than the model's, rounded")


CHECKS = (
    kernel_of_decoding,
    decoding,
    decoding_in_products,
    other_seats,
    moved_weights,
    packed,
    the_same_gradients_again,
    one_side_stream,
    failed_capture,
    second_card,
    cutting,
    rounding,
    kept_graphs,
    sampled_logits,
)
