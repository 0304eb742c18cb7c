"""What vLLM in this process is made with."""

from typing import Any

from grpo_fn.shell.sampler.completions import positions
from grpo_fn.shell.sampler.interface import Seat

BATCHED = 4096  # tokens computed at once on a CPU


def arguments(
    seat: Seat,
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
    world = seat.world
    if tensor_parallel < 1 or world.size % tensor_parallel:
        raise ValueError(f"tensor_parallel: got {tensor_parallel} for {world.size} ranks, wanted a divisor of them")
    on_cuda = world.device.type == "cuda"
    if on_cuda and world.size == 1 and world.device.index not in (None, 0):
        raise ValueError(
            f"device: got {world.device}, wanted cuda:0, which is where vLLM goes; choose with CUDA_VISIBLE_DEVICES"
        )
    of_cuda = {"gpu_memory_utilization": gpu_memory_utilization, "enable_sleep_mode": True}
    # A prompt that is read in two parts takes back a draw of its generator, which those of the CPU cannot (0.32).
    whole = {"enable_chunked_prefill": False, "max_num_batched_tokens": at_once(seat, max_model_len)}
    return {
        **(of_cuda if on_cuda else {"kv_cache_memory_bytes": kv_cache_bytes, **whole}),
        # Every rank has an engine in it, and those of a group work in step; torchrun has started them all.
        **({"distributed_executor_backend": "external_launcher"} if world.size > 1 else {}),
        "model": seat.folder,
        "dtype": str(seat.dtype).removeprefix("torch."),
        "tensor_parallel_size": tensor_parallel,
        "max_model_len": max_model_len,
        "max_num_seqs": max_rows,
        "enforce_eager": enforce_eager,
        "skip_tokenizer_init": not detokenize,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # not the folder's: temperature and ends are said with every request
        "seed": 0,  # every row brings its own
        "use_tqdm_on_load": False,
    }


def at_once(seat: Seat, max_model_len: int | None) -> int:
    """Tokens that are computed at once where every prompt is read whole: the longest that there may be, at least."""
    return max(BATCHED, max_model_len or positions(seat.config) or 0)


def check_deadline(deadline: float, seat: Seat) -> None:
    """Raise ValueError unless it is positive, and shorter than other ranks wait for this one."""
    if not deadline > 0:
        raise ValueError(f"deadline: got {deadline} s, wanted more than 0")
    if seat.world.size > 1 and deadline >= seat.world.deadline:
        raise ValueError(
            f"deadline: got {deadline:g} s to generate, wanted less than the {seat.world.deadline:g} s that ranks wait "
            "for one another (mesh.Scale.deadline)"
        )
