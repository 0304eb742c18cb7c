"""vLLM's options: engine arguments, and sampling functions as fields of its SamplingParams with a seed for each row.

vLLM draws by itself, so sampling functions are translated, not called. The distribution is the same; the draws are
not, for vLLM makes its own random numbers from a seed.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from grpo_fn.core import prng
from grpo_fn.core.partials import function_and_knobs
from grpo_fn.core.sampling import categorical, greedy, nucleus
from grpo_fn.shell.sampler.interface import SamplerContext, positions

SEEDS = 2**31  # vLLM takes them as signed numbers of 32 bits
BATCHED = 4096  # tokens computed at once on a CPU, at least
COOLEST, HOTTEST = 0.01, 2.0  # what vLLM (0.32) takes: it raises a lower temperature to 0.01, and refuses higher ones

# What the sampler says itself: prompts, seeds, ends, lengths and log-probs are not a user's to set.
OURS = {
    *("n", "seed", "temperature", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
    *("logprobs", "prompt_logprobs", "logprob_token_ids", "flat_logprobs", "detokenize", "output_kind"),
    *("skip_special_tokens", "skip_clone", "trace_decode_token_ids"),
}
# Fields of SamplingParams that leave the distribution as it is at this value; any other field may move it.
NEUTRAL: dict[str, Any] = {
    **{"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "min_p": 0, "min_tokens": 0},
    **{"top_p": 1, "logit_bias": None, "bad_words": None, "allowed_token_ids": None, "structured_outputs": None},
    **{"thinking_token_budget": None, "repetition_detection": None, "extra_args": None},
}
KEEPS_ALL = (0, -1)  # of top_k


def params(token_sampler: Callable[..., tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """The fields that make vLLM draw as `token_sampler` does, with the knobs that are bound to it.

    Raises ValueError for other functions than greedy, categorical and nucleus, and for temperatures that vLLM changes
    or refuses.
    """
    function, knobs = function_and_knobs(token_sampler)
    if function is greedy:
        return {"temperature": 0.0}
    if function not in (categorical, nucleus):
        name = getattr(function, "__qualname__", repr(function))
        raise ValueError(
            f"token_sampler: got {name}, wanted sampling.greedy, sampling.categorical or sampling.nucleus: vLLM draws "
            "itself and calls no function of ours (with the local sampler any function goes)"
        )
    if not COOLEST <= knobs["temperature"] <= HOTTEST:
        raise ValueError(
            f"temperature: got {knobs['temperature']}, wanted one that vLLM draws at, {COOLEST:g} to {HOTTEST:g} "
            "(sampling.greedy is the limit 0)"
        )
    return {name: knobs[name] for name in ("temperature", "top_p", "top_k") if name in knobs}


def check_extra(extra: Mapping[str, Any], *, allow_biased: bool) -> None:
    """Raise ValueError for fields that the sampler sets itself, and for those that bias unless that is accepted.

    With a penalty, a cut or a banned token the completions come from another distribution than the one whose
    log-probabilities the trainer computes.
    """
    if reserved := sorted(OURS & {*extra}):
        raise ValueError(
            f"extra: got {', '.join(reserved)}, which the sampler sets itself; wanted other SamplingParams"
        )
    if not allow_biased and (biased := sorted(name for name, value in extra.items() if not is_neutral(name, value))):
        listed = ", ".join(f"{name} = {extra[name]!r}" for name in biased)
        raise ValueError(
            f"extra: got {listed}, which may draw from another distribution than the trainer's, wanted none of it, or "
            "sections.Sampling.allow_biased = True to train all the same"
        )


def is_neutral(name: str, value: Any) -> bool:
    """Whether this field of SamplingParams leaves the distribution as it is."""
    if name == "top_k":
        return value in KEEPS_ALL
    return name in NEUTRAL and (value == NEUTRAL[name] or (not value and not NEUTRAL[name]))


def merge_options(drawn: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """Both together. Raises ValueError where they disagree."""
    if twice := sorted(name for name in drawn.keys() & extra.keys() if drawn[name] != extra[name]):
        raise ValueError(
            f"extra: got {', '.join(f'{name} = {extra[name]!r}' for name in twice)}, wanted as `token_sampler` has it, "
            f"{', '.join(f'{name} = {drawn[name]!r}' for name in twice)}"
        )
    return {**drawn, **extra}


def row_seeds(key: Int[Tensor, "2"], uids: Sequence[int], group_size: int) -> list[tuple[int, ...]]:
    """For each problem a seed for each of its G completions: a function of fold_in(key, uid, g) and of nothing else.

    0 <= seed < 2^31. Two rows of a step of R rows share one with probability below R^2 / 2^32; equal prompts with equal
    seeds would give equal completions.
    """
    uid, g = torch.tensor([*uids])[:, None], torch.arange(group_size)[None]
    return [tuple(row) for row in prng.randint(prng.fold_in(key.cpu(), uid, g), low=0, high=SEEDS).tolist()]


def arguments(
    context: SamplerContext,
    *,
    tensor_parallel: int,
    max_model_len: int | None,
    max_rows: int,
    gpu_memory_utilization: float,
    kv_cache_bytes: int,
    enforce_eager: bool,
    detokenize: bool,
) -> dict[str, Any]:
    """What vLLM's LLM is made with.

    With processed_logprobs it gives the log-probabilities under the distribution it draws from, temperature and all.
    Raises ValueError for ranks and devices that it cannot be spread over.
    """
    world = context.world
    if tensor_parallel < 1 or world.size % tensor_parallel:
        raise ValueError(f"tensor_parallel: got {tensor_parallel} for {world.size} ranks, wanted a divisor of them")
    on_cuda = world.device.type == "cuda"
    if on_cuda and world.size == 1 and world.device.index not in (None, 0):
        raise ValueError(
            f"device: got {world.device}, wanted cuda:0, which is where vLLM goes; choose with CUDA_VISIBLE_DEVICES"
        )
    of_cuda = {"gpu_memory_utilization": gpu_memory_utilization, "enable_sleep_mode": True}
    # A prompt that is read in two parts takes back a draw of its generator, which those of the CPU cannot (0.32): every
    # prompt is read whole, also the longest that there may be.
    longest = max_model_len or positions(context.config) or 0
    whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(BATCHED, longest)}
    return {
        **(of_cuda if on_cuda else {"kv_cache_memory_bytes": kv_cache_bytes, **whole}),
        # Every rank has an engine in it, and those of a group work in step; torchrun has started them all.
        **({"distributed_executor_backend": "external_launcher"} if world.size > 1 else {}),
        "model": context.folder,
        "dtype": str(context.dtype).removeprefix("torch."),
        "tensor_parallel_size": tensor_parallel,
        "max_model_len": max_model_len,
        "max_num_seqs": max_rows,
        "enforce_eager": enforce_eager,
        "skip_tokenizer_init": not detokenize,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # not the folder's: temperature and stop tokens come with every request
        "seed": 0,  # every row brings its own
        "use_tqdm_on_load": False,
    }


def check_deadline(deadline: float, context: SamplerContext) -> None:
    """Raise ValueError unless it is positive, and shorter than other ranks wait for this one."""
    if not deadline > 0:
        raise ValueError(f"generate_timeout: got {deadline} s, wanted more than 0")
    if context.world.size > 1 and deadline >= context.world.deadline:
        raise ValueError(
            f"generate_timeout: got {deadline:g} s to generate, wanted less than the {context.world.deadline:g} s that "
            "ranks wait for one another (mesh.Parallelism.collective_timeout)"
        )
