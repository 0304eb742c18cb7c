"""What to think of a machine, from facts about it: what a process that looked came back with, to findings."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

from grpo_fn.doctor.report import DoctorFinding, State

GB = 1e9
# Judgement, not measurement: below these something ordinary is likely to fail.
LOW_MEMORY = 4 * GB
LOW_DISK = 10 * GB
LOW_SHARED = 1 * GB  # docker gives 64 MB; NCCL and vLLM pass tensors between processes there
LOW_FILES = 4096
STATE_BYTES = 16  # a parameter that trains: float32 weight, gradient and two moments
FREE_SHARE = 0.9  # of a device's memory; less is free where another process is at work

Facts = Mapping[str, Any]
_device_finding, _host_finding = partial(DoctorFinding, "devices"), partial(DoctorFinding, "host")
_engine_finding, _model_finding = partial(DoctorFinding, "engines"), partial(DoctorFinding, "model")


class Reply(NamedTuple):
    """Either facts, or why there are none."""

    facts: Facts | None
    trouble: str


# -- devices


def devices(reply: Reply) -> Iterator[DoctorFinding]:
    """torch's build, its devices and their links, of `probe_devices.device_facts`."""
    if reply.facts is None:
        todo = "install torch again for this machine's driver (docs/install.md), or see what nvidia-smi says"
        yield _device_finding("torch", State.BROKEN, reply.trouble, todo)
        return
    facts = reply.facts
    parts = ("CUDA", "cuDNN", "NCCL")
    built = " ".join(f"{name} {facts[name.lower()]}" for name in parts if facts[name.lower()] is not None)
    yield _device_finding("torch", State.OK, f"{facts['torch']}, {built or 'built for CPU'}")
    if facts["trouble"]:
        todo = f"update the driver, or install a torch built for a CUDA older than {facts['cuda']}"
        yield _device_finding("CUDA", State.BROKEN, facts["trouble"], todo)
    elif not facts["devices"]:
        yield _device_finding("GPU", State.OK, "none that torch can use: everything runs on the CPU")
    else:
        seen = f"{len(facts['devices'])} devices; the tests of grpo_fn have run on CPU alone"
        yield _device_finding("CUDA", State.UNTESTED, seen, "watch loss/logprob_diff_mean of the first steps")
    for i, device in enumerate(facts["devices"]):
        yield _device(i, device)
    if len(facts["devices"]) < 2:
        return
    if facts["nccl"] is None:
        todo = "install a torch that is built with NCCL: without it GPUs cannot train together"
        yield _device_finding("NCCL", State.BROKEN, "not in this torch", todo)
    if apart := sorted({tuple(sorted(pair)) for pair in facts["apart"]}):
        seen = f"none between {', '.join(f'cuda:{a} and cuda:{b}' for a, b in apart)}: they talk through host memory"
        yield _device_finding("peer access", State.WARNING, seen, "slower, not wrong: see nvidia-smi topo -m")
    else:
        yield _device_finding("peer access", State.OK, "between all devices")


def _device(i: int, device: Facts) -> DoctorFinding:
    major, minor = device["capability"]
    free, total = device["free"], device["total"]
    bf16 = "bf16" if device["bf16"] else "no bf16"
    seen = f"{device['name']}, capability {major}.{minor}, {gb(free)} of {gb(total)} free, {bf16}"
    if free < FREE_SHARE * total:
        return _device_finding(f"cuda:{i}", State.WARNING, seen, "another process holds the rest: see nvidia-smi")
    if not device["bf16"]:
        todo = "compute in float32 or lay scale/fp16.gin over the run, not scale/bf16.gin"
        return _device_finding(f"cuda:{i}", State.WARNING, seen, todo)
    return _device_finding(f"cuda:{i}", State.OK, seen)


def check_all_reduce(reply: Reply, count: int) -> DoctorFinding:
    """Of `probe_devices.time_all_reduce` over so many devices."""
    if reply.facts is None:
        todo = "NCCL_DEBUG=INFO names the link; if NCCL_P2P_DISABLE=1 helps it is peer access (docs/running/cluster.md)"
        return _device_finding("all-reduce", State.BROKEN, reply.trouble, todo)
    return _device_finding("all-reduce", State.OK, f"{count} devices, {reply.facts['seconds'] * 1e3:.3g} ms for 4 MB")


# -- the host


def check_host(reply: Reply, *, parameters: int, gpus: int, vllm: bool) -> Iterator[DoctorFinding]:
    """Of `doctor.probe_host.host_facts`, for a model of so many parameters (0 where none is known)."""
    if reply.facts is None:
        yield _host_finding("host", State.WARNING, reply.trouble, "look at memory, disk and limits by hand")
        return
    facts = reply.facts
    yield _threads(facts)
    training = STATE_BYTES * parameters
    need = max(LOW_MEMORY, 0 if gpus else training)
    why = f"wanted {gb(need)}" + (f" to train {parameters:,} parameters in float32" if need > LOW_MEMORY else "")
    seen = f"{gb(facts['memory_free'])} of {gb(facts['memory'])} free"
    yield _enough("memory", facts["memory_free"], need, seen, why, "free some, or a smaller model; --dry_run estimates")
    need = max(LOW_DISK, training)  # a checkpoint, and the folder at the end
    seen, todo = f"{gb(facts['disk_free'])} free here", "run where there is space: --run_dir"
    yield _enough("disk", facts["disk_free"], need, seen, f"wanted {gb(need)} for checkpoints", todo)
    if facts["shared"] is not None:
        need = LOW_SHARED if gpus > 1 or vllm else 0
        seen, why = f"{gb(facts['shared_free'])} of {gb(facts['shared'])} free", f"wanted {gb(need)} (NCCL, vLLM)"
        yield _enough("/dev/shm", facts["shared_free"], need, seen, why, "in docker: --ipc=host or --shm-size=8g")
    files = float("inf") if facts["files"] < 0 else facts["files"]
    seen = f"{files:g} files may be open"
    yield _enough("limits", files, LOW_FILES, seen, f"wanted {LOW_FILES}", "ulimit -n 65536, before starting")


def _enough(subject: str, got: int | float, need: int | float, seen: str, why: str, todo: str) -> DoctorFinding:
    if got < need:
        return _host_finding(subject, State.WARNING, f"{seen}, {why}", todo)
    return _host_finding(subject, State.OK, seen)


def _threads(facts: Facts) -> DoctorFinding:
    cpus, threads = facts["cpus"], facts["threads"]
    seen = f"{cpus}; OMP_NUM_THREADS" + (" not set" if threads is None else f"={threads}")
    if threads is None or (threads.isdecimal() and 1 <= int(threads) <= cpus):
        return _host_finding("processors", State.OK, seen)
    todo = f"OMP_NUM_THREADS between 1 and {cpus}; {cpus} divided by the ranks of a host is a good start"
    return _host_finding("processors", State.WARNING, seen, todo)


# -- the model


def check_transformers(reply: Reply, *, gpus_without_bf16: bool) -> Iterator[DoctorFinding]:
    """Of `probe_transformers.open_in_transformers`."""
    if reply.facts is None:
        todo = "mend the folder: it needs config.json, model*.safetensors and the tokenizer's files, all of one model"
        yield _model_finding("transformers", State.BROKEN, reply.trouble, todo)
        return
    facts = reply.facts
    dtypes = ", ".join(sorted(facts["dtypes"]))
    template = "with" if facts["template"] else "without"
    size = f"{facts['parameters']:,} parameters in {dtypes}"
    seen = f"{facts['architecture']}, {size}, {facts['tokens']} tokens, {template} a chat template"
    yield _model_finding("transformers", State.OK, seen)
    if facts["forward"]:
        todo = "nothing, if training starts: only what depends on values was not tried"
        yield _model_finding("forward pass", State.WARNING, f"not tried: {facts['forward']}", todo)
    if gpus_without_bf16 and "BF16" in facts["dtypes"]:
        todo = "compute in float32 or lay scale/fp16.gin over the run"
        yield _model_finding("weights", State.WARNING, "stored in bfloat16, which a GPU here cannot compute in", todo)


def check_flash_attention(reply: Reply) -> DoctorFinding:
    """Whether flash-attn, which is there, imports: where it does not, transformers may not either."""
    if reply.facts is None:
        todo = "build it against this torch: pip install --no-build-isolation --force-reinstall --no-deps flash-attn"
        return _engine_finding("flash-attn", State.BROKEN, reply.trouble, todo)
    return _engine_finding("flash-attn", State.OK, f"{reply.facts['version']} imports")


def check_flash_attention_3(reply: Reply) -> DoctorFinding:
    """Whether FlashAttention-3, which is there, imports."""
    if reply.facts is None:
        todo = "build the folder hopper of github.com/Dao-AILab/flash-attention against this torch, or uninstall it"
        return _engine_finding("flash-attn 3", State.BROKEN, reply.trouble, todo)
    return _engine_finding("flash-attn 3", State.OK, f"{reply.facts['version']} imports")


def vllm_alone(reply: Reply) -> DoctorFinding:
    """Of `probe_vllm.open_in_vllm` where vLLM does not import, or was given no folder."""
    if reply.facts is None:
        todo = "an environment of its own (docs/install.md), or uninstall it: only its own sampler needs it"
        return _engine_finding("vLLM", State.BROKEN, reply.trouble, todo)
    return _engine_finding("vLLM", State.OK, f"{reply.facts['version']} imports, for {reply.facts['platform']}")


def check_vllm(facts: Facts, *, wanted: bool) -> DoctorFinding:
    """Of `probe_vllm.open_in_vllm` with a folder, which is broken or doubtful by whether vLLM is `wanted`."""
    finding = partial(_model_finding, "vLLM")
    bad = State.BROKEN if wanted else State.WARNING
    instead = "use the local sampler (local_sampler.local)"
    if "refused" in facts:
        return finding(bad, facts["refused"], f"another model or another vLLM; otherwise {instead}")
    seen = f"{facts['architecture']}, head_dim {facts['head_dim']}, {facts['dtype']}, {facts['positions']} positions"
    if not facts["generates"]:
        return finding(bad, f"{seen}: it does not generate text", "a causal language model")
    if facts["head_dims"] is not None and facts["head_dim"] not in facts["head_dims"]:
        sizes = ", ".join(map(str, facts["head_dims"]))
        todo = f"on a CPU a model whose head_dim is one of {sizes}; otherwise {instead}"
        return finding(bad, f"{seen}: vLLM's CPU attention does not take that head_dim", todo)
    if not facts["native"]:
        seen = f"{seen}, through vLLM's transformers backend"
        return finding(State.UNTESTED, seen, f"compare loss/logprob_diff_mean of the first steps; or {instead}")
    return finding(State.OK, seen)


def gb(size: int | float) -> str:
    """Bytes as GB (1e9)."""
    return f"{size / GB:.3g} GB"
