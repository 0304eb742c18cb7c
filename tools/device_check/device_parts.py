"""What the checks of a device share: a policy and a sampler in place, a reward, clocks and memory, distances."""

import platform
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import torch
from device_runner import Figure, Setting
from device_shapes import EOS, Work
from torch import Tensor
from transformers import AutoConfig, PreTrainedTokenizerBase

from grpo_fn.algo import advantage, credit, losses, objective
from grpo_fn.algo.objective import policy_objective
from grpo_fn.algo.step import Algorithm, Experience, Span, grpo_step
from grpo_fn.core import prng, sampling
from grpo_fn.core.problem import Completion, Problem
from grpo_fn.core.types import Carry, Sampler
from grpo_fn.rewards.combine import combine, score_serially
from grpo_fn.shell.model import blocks
from grpo_fn.shell.model.logprob_model import LogprobModel
from grpo_fn.shell.model.lora import LoRA
from grpo_fn.shell.policy import optimizer
from grpo_fn.shell.policy.fsdp import FSDPPolicy
from grpo_fn.shell.policy.load_and_shard import LoadedModel, ModelSpec, load_and_shard
from grpo_fn.shell.policy.mesh import Parallelism
from grpo_fn.shell.sampler.interface import DataParallelSampler, SamplerContext, SamplerOptions
from grpo_fn.shell.sampler.local import local_sampler
from grpo_fn.shell.world import World, alone, find_device

KEY = 20_26
GB = 1e9


def machine(setting: Setting) -> list[Figure]:
    """The card and what runs on it. Raises ValueError where the device is not there."""
    device = find_device(setting.device, 0)
    card = f"CPU, {platform.machine()}, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        card = f"{about.name}, {about.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    programs = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]  # a package's has no word of CUDA
    for name in ("transformers", "triton", "peft", "flash-attn", "trl", "vllm"):
        with suppress(PackageNotFoundError):
            programs.append(f"{name} {version(name)}")
    return [Figure("on", card), Figure("with", ", ".join(programs))]


# -- a policy and a sampler


def grpo_objective(beta: float, entropy_bonus: float) -> Callable[..., Any]:
    """GRPO's."""
    return partial(
        policy_objective,
        token_loss=partial(losses.clipped_ratio, clip_low=0.2, clip_high=0.2),
        importance_correction=None,
        kl=objective.k3,
        loss_aggregation=objective.token_mean,
        beta=beta,
        entropy_bonus=entropy_bonus,
    )


def scale(**changed: Any) -> Parallelism:
    """One device, nothing saved; `changed` are fields of Parallelism."""
    usual = {
        **{"dp_replicate": 1, "dp_shard": "rest", "tp": 1, "reshard_after_forward": False},
        **{"offload": False, "offload_reference": False, "collective_timeout": 60.0},
        **{"activation_checkpointing": blocks.no_checkpointing, "compile": blocks.eager},
    }
    return Parallelism(**{**usual, **changed})


class Bench(NamedTuple):
    """A policy in place, and what it takes to sample from it."""

    policy: FSDPPolicy
    placed: LoadedModel
    placing: ModelSpec
    world: World

    def context(self) -> SamplerContext:
        """What a sampler is made from."""
        return SamplerContext(
            folder=self.placing.folder,
            config=self.placing.config,
            dtype=self.placing.dtype,
            world=self.world,
            adapters=self.placing.adapters,
            full_model=self.placed.decoding,
        )

    def sampler(self, work: Work) -> DataParallelSampler:
        """The local sampler, as a run has it."""
        return DataParallelSampler(local(self.context(), work), self.world)

    def step(
        self, sampler: Sampler, carried: Carry, *, prompts: int, group_size: int, key: Tensor, span: Span
    ) -> tuple[Experience, Carry, dict[str, float]]:
        """A step of GRPO with one update, and a reward that rows of random tokens differ in."""
        algo = Algorithm(
            objective=grpo_objective(0.0, 0.0),
            credit=partial(credit.outcome, advantage=partial(advantage.group_normalized, eps=1e-4, ddof=1)),
            prompts=prompts,
            group_size=group_size,
        )
        reward = partial(combine, parts=[even], weights=[1.0], score=score_serially)
        return grpo_step(
            self.policy,
            sampler,
            problems,
            carried,
            key=key,
            algo=algo,
            reward=reward,
            span=span,
            teacher=None,
            demonstrations=None,
        )


def built(
    setting: Setting,
    model: str,
    dtype: torch.dtype,
    *,
    packed: bool = True,
    adapters: LoRA | None = None,
    micro_tokens: int = 16_384,
    logits_chunk_elements: int = 2**27,
    temperature: float = 1.0,
    lr: float = 1e-6,
    scaling: Any = None,
    initial_scale: float = 1.0,
    **changed: Any,
) -> Bench:
    """The policy as `train` puts it together, of one rank; `changed` are fields of Parallelism."""
    world = alone(find_device(setting.device, 0))
    placing = ModelSpec(
        folder=model,
        config=AutoConfig.from_pretrained(model),
        dtype=dtype,
        attention="sdpa",
        adapters=adapters,
        logprob_model=partial(
            LogprobModel, temperature=temperature, logits_chunk_elements=logits_chunk_elements, packed=packed
        ),
        parallelism=scale(**changed),
        key=prng.key(KEY, device="cpu"),
    )
    placed = load_and_shard(world, placing, reference=False, teachers={})
    policy = FSDPPolicy(
        placed.logprob_model,
        world=world,
        data=placed.data,
        reference_model=None,
        dropout_modules=placed.dropout_modules,
        seed=0,
        micro_tokens=micro_tokens,
        min_micro_batches=1,
        optimizer=partial(optimizer.adamw, lr=lr, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0),
        schedule=partial(optimizer.constant, warmup=0),
        loss_scale=scaling,
        initial_scale=initial_scale,
        max_grad_norm=1.0,
    )
    return Bench(policy, placed, placing, world)


def local(context: SamplerContext, work: Work) -> local_sampler.LocalSampler:
    """The local sampler in that context, with a slot for every row."""
    return local_sampler.local(context, options(context, work))


def options(context: SamplerContext, work: Work) -> SamplerOptions:
    """What every sampler of that work is given."""
    return SamplerOptions(
        tokenizer=Numbers(),
        token_sampler=partial(sampling.categorical, temperature=1.0),
        encode=partial(random_prompt, context.config.vocab_size, work.prompt),
        max_new_tokens=work.new,
        stop=(),
        max_rows=work.rows,
    )


class Numbers(PreTrainedTokenizerBase):
    """A tokenizer that writes a token as its number, and reads nothing."""

    eos_token_id = EOS

    def __init__(self) -> None:
        """Without the files that others have."""

    def __repr__(self) -> str:
        return "Numbers()"

    def decode(self, row: Sequence[int], skip_special_tokens: bool) -> str:
        """One text."""
        return " ".join(map(str, row))

    def batch_decode(self, rows: Sequence[Any], skip_special_tokens: bool) -> list[str]:
        """One text a row."""
        return [self.decode(row, skip_special_tokens) for row in rows]


def random_prompt(vocabulary: int, tokens: int, tokenizer: Any, prompt: str) -> list[int]:
    """Random tokens, the same for the same prompt, whatever it says."""
    key = prng.key(zlib.crc32(prompt.encode()), device="cpu")
    u = prng.uniform(key, tokens, low=1.0, high=vocabulary - 1.0, dtype=torch.float64)
    return u.long().tolist()


def problems(first: int, count: int) -> list[Problem]:
    """Prompts first, ..., first + count - 1 of an endless stream."""
    return [Problem(uid, str(uid), "", {}) for uid in range(first, first + count)]


def even(problem: Problem, completion: Completion) -> float:
    """The share of even tokens."""
    tokens = completion.text.split()
    return sum(token[-1] in "02468" for token in tokens) / max(1, len(tokens))


# -- clocks and memory


def wait(device: str) -> None:
    """Until the device has done all work queued on it."""
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(device: str, f: Callable[[], Any], *, times: int) -> float:
    """Of one call, over so many in a row."""
    wait(device)
    begun = time.perf_counter()
    for _ in range(times):
        f()
    wait(device)
    return (time.perf_counter() - begun) / times


def peak(device: str) -> float:
    """Most gigabytes that tensors held on the device since `forget`; 0 on a CPU."""
    return torch.cuda.max_memory_allocated() / GB if device == "cuda" else 0.0


def most_held(setting: Setting) -> list[Figure]:
    """`peak` as a figure; none on a CPU."""
    return [Figure("peak memory", peak(setting.device), "GB")] if setting.device == "cuda" else []


def forget(device: str) -> None:
    """`peak` begins anew."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


@contextmanager
def full_float32() -> Iterator[None]:
    """Matrix products of float32 in float32, not in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def distance(got: dict[str, Tensor], expected: dict[str, Tensor]) -> tuple[float, float]:
    """Of two sets of tensors: the largest difference over the largest entry, and the norm of all over the norm."""
    if got.keys() != expected.keys():
        raise AssertionError(f"got {sorted(got.keys() ^ expected.keys())[:3]} on one side alone")
    apart = {name: got[name].cpu().double() - x.cpu().double() for name, x in expected.items()}
    biggest = [max(float(x.abs().max()) for x in one.values()) for one in (apart, expected)]
    norm = [sum(float(x.double().square().sum()) for x in one.values()) ** 0.5 for one in (apart, expected)]
    return biggest[0] / biggest[1], norm[0] / norm[1]


def require(holds: bool, what: str) -> None:
    """Raise AssertionError, saying `what`, unless it holds; a plain assert is not run under python -O."""
    if not holds:
        raise AssertionError(what)


def within(what: str, value: float, most: float, *, goal: float, unit: str = "") -> Figure:
    """The figure, with a goal. Raises AssertionError for one above `most`."""
    require(value <= most, f"{what}: got {value:.2g}, expected at most {most:g}")
    return Figure(what, value, unit, at_most=goal)
