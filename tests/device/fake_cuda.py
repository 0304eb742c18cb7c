"""`torch.cuda` on the fake device: importing this, before torch, makes `torch.device("cuda")` usable without a card.

Tensors lie in the host's memory and hold real numbers; fake_cuda.cpp says what is strict. Here is what Python asks of
`torch.cuda`: two devices, a current one for each thread, streams that are distinct though nothing overlaps, graphs
whose capture fails as CUDA's does, memory in bytes allocated. A stream that is asked for counts as use of its device,
as it opens a context on a card.
"""

import contextlib
import ctypes
import importlib
import itertools
import os
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIBRARY = "FAKE_CUDA_LIBRARY"  # the environment variable with the path of the C++ part
if "torch" in sys.modules:
    raise ImportError("got torch imported before fake_cuda, expected it after: it asks once which devices there are")
ctypes.CDLL(os.environ[LIBRARY], mode=ctypes.RTLD_GLOBAL)
sys.path.insert(0, str(Path(os.environ[LIBRARY]).parent))

import torch  # noqa: E402
import torch._dynamo  # noqa: E402 looks at torch.cuda as it is without the device
import torch.distributed as dist  # noqa: E402
from torch.distributed.fsdp._fully_shard import _fsdp_param  # noqa: E402, F401
from torch.testing._internal.distributed import fake_pg  # noqa: E402, F401 registers the backend "fake"

backend = importlib.import_module("fake_cuda_backend")

CARD = "fake H100"
MEMORY = 80 * 2**30  # bytes of a card
MODES = ("default", "warn", "error")  # of torch.cuda.set_sync_debug_mode

_local = threading.local()
_number = itertools.count(1)


def index_of(device: Any) -> int:
    """The number of a device given as torch takes one; the current one for None."""
    device = torch.device("cuda", device) if isinstance(device, int) else device and torch.device(device)
    return backend.current_device() if device is None or device.index is None else device.index


# -- streams, events, graphs


class Stream:
    """A queue of one device. What is queued is done at once."""

    made = 0  # by anybody, the devices' default ones not counted

    def __init__(self, device: Any = None, priority: int = 0, *, default: bool = False, **_: Any) -> None:
        self.device = torch.device("cuda", index_of(device))
        self.device_index, self.device_type = self.device.index, 1
        self.stream_id = self.cuda_stream = 0 if default else next(_number)
        Stream.made += not default
        if not default:
            backend.touch(self.device.index)

    def wait_stream(self, other: "Stream") -> None: ...

    def wait_event(self, event: "Event") -> None: ...

    def synchronize(self) -> None:
        backend.wait("Stream.synchronize")

    def query(self) -> bool:
        return True

    def is_capturing(self) -> bool:
        return backend.is_capturing()

    def record_event(self, event: "Event | None" = None) -> "Event":
        return event or Event()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.device, self.stream_id) == (other.device, other.stream_id)

    def __hash__(self) -> int:
        return hash((self.device, self.stream_id))

    def __enter__(self) -> "Stream":
        _local.__dict__.setdefault("before", []).append(current_stream(self.device))
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        set_stream(_local.before.pop())


class Event:
    """Over as soon as it is recorded."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, stream: Stream | None = None) -> None:
        backend.touch(backend.current_device())

    def wait(self, stream: Stream | None = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        backend.wait("Event.synchronize")

    def elapsed_time(self, other: "Event") -> float:
        return 1.0


DEFAULT_STREAMS = [Stream(device, default=True) for device in range(backend.DEVICES)]


def current_stream(device: Any = None) -> Stream:
    """This thread's on the device."""
    index = index_of(device)
    backend.touch(index)
    return _local.__dict__.setdefault("streams", {}).get(index, DEFAULT_STREAMS[index])


def set_stream(stream: Stream | None) -> None:
    """Make it the current one of its device, and its device the current one."""
    if stream is not None:
        backend.set_device(stream.device.index)
        _local.__dict__.setdefault("streams", {})[stream.device.index] = stream


@contextlib.contextmanager
def stream_context(stream: Stream | None) -> Iterator[None]:
    """As `torch.cuda.stream`."""
    before = current_stream()
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


class CUDAGraph:
    """What a region launched on its device; `replay` launches it again."""

    made = replayed = 0

    def __init__(self, keep_graph: bool = False) -> None:
        self.captured = backend.Capture()
        CUDAGraph.made += 1

    def replay(self) -> None:
        CUDAGraph.replayed += 1
        self.captured.replay()

    def reset(self) -> None:
        self.captured = backend.Capture()

    def pool(self) -> tuple[int, int]:
        return (0, 0)


class graph:
    """Captures into a CUDAGraph. As with CUDA, one that was broken raises at its end and leaves its stream current."""

    def __init__(self, cuda_graph: CUDAGraph, pool: Any = None, stream: Stream | None = None, **_: Any) -> None:
        self.graph, self.stream = cuda_graph, stream or Stream()

    def __enter__(self) -> None:
        backend.wait("capture begins", debugged=False)
        self.before = current_stream()
        set_stream(self.stream)
        self.graph.captured = backend.Capture()
        backend.begin(self.graph.captured)

    def __exit__(self, *_: object) -> None:
        backend.end()
        if self.graph.captured.broken:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        if not len(self.graph.captured):
            raise RuntimeError("The CUDA Graph is empty: its kernels went to another device or stream")
        set_stream(self.before)


@contextlib.contextmanager
def device_context(device: Any) -> Iterator[None]:
    """As `torch.cuda.device`."""
    before = backend.current_device()
    backend.set_device(index_of(device))
    try:
        yield
    finally:
        backend.set_device(before)


# -- torch.cuda


def properties(device: Any = None) -> types.SimpleNamespace:
    """What transformers, Inductor and we look at."""
    return types.SimpleNamespace(
        **{"name": CARD, "major": 9, "minor": 0, "total_memory": MEMORY, "multi_processor_count": 132},
        **{"is_integrated": False, "max_threads_per_multi_processor": 2048, "warp_size": 32, "gcnArchName": ""},
        **{"regs_per_multiprocessor": 65536, "L2_cache_size": 50 * 2**20, "shared_memory_per_block_optin": 232448},
    )


def nothing() -> Any:
    """A function that does nothing, a new one each time: dynamo compares functions by identity."""
    return lambda *_, **__: None


PATCHES = {
    **{"is_available": lambda: True, "is_initialized": lambda: True, "_is_compiled": lambda: True},
    **{"_lazy_init": nothing(), "init": nothing(), "_is_in_bad_fork": lambda: False, "_lazy_call": lambda f, **_: f()},
    **{"device_count": lambda: backend.DEVICES, "current_device": backend.current_device},
    **{"set_device": lambda device: backend.set_device(index_of(device)), "device": device_context},
    **{"get_device_name": lambda device=None: CARD, "get_device_capability": lambda device=None: (9, 0)},
    **{"get_device_properties": properties, "is_bf16_supported": lambda including_emulation=True: True},
    **{"can_device_access_peer": lambda a, b: True, "utilization": lambda device=None: 0},
    "synchronize": lambda device=None: backend.wait("cuda.synchronize", debugged=False),
    **{"Stream": Stream, "Event": Event, "stream": stream_context, "current_stream": current_stream},
    **{"default_stream": lambda device=None: DEFAULT_STREAMS[index_of(device)], "set_stream": set_stream},
    **{"CUDAGraph": CUDAGraph, "graph": graph, "graph_pool_handle": lambda: (0, 0)},
    "is_current_stream_capturing": backend.is_capturing,
    "get_sync_debug_mode": lambda: MODES.index(backend.sync_debug_mode()),
    "set_sync_debug_mode": lambda mode: backend.set_sync_debug_mode(mode if isinstance(mode, str) else MODES[mode]),
    "default_generators": tuple(torch.Generator() for _ in range(backend.DEVICES)),
}
MEMORY_PATCHES = {
    **{"empty_cache": nothing(), "ipc_collect": nothing(), "memory_stats": lambda device=None: {}},
    **{"reset_peak_memory_stats": nothing(), "set_per_process_memory_fraction": nothing()},
    **dict.fromkeys(
        ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
        lambda device=None: backend.allocated(index_of(device)),
    ),
    "mem_get_info": lambda device=None: (MEMORY - backend.allocated(index_of(device)), MEMORY),
    "get_per_process_memory_fraction": lambda device=None: 1.0,
}


def alloc_storage(tensor: torch.Tensor) -> None:
    """FSDP2's: torch does not resize storages of this device, and it frees what it has gathered that way."""
    resize(tensor, tensor.numel() * tensor.itemsize)


def free_storage(tensor: torch.Tensor) -> None:
    """FSDP2's."""
    resize(tensor, 0)


def resize(tensor: torch.Tensor, size: int) -> None:
    """Give the tensor's storage so many bytes."""
    if tensor.untyped_storage().size() != size:
        if tensor.is_cuda:
            backend.resize_storage(tensor, size)
        else:
            tensor.untyped_storage().resize_(size)


def init_process_group(backend_name: str | None = None, *, device_id: Any = None, **more: Any) -> None:
    """The place of NCCL is taken by torch's backend "fake", in which one rank is alone and finds its own numbers."""
    _init_process_group(backend_name and backend_name.replace("nccl", "fake"), **more)


def storage_to_cpu(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """A copy on the host; torch.save asks for it."""
    if storage.device.type != "cuda":
        return _storage_to_cpu(storage)
    whole = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (storage.nbytes(),), (1,))
    return whole.cpu().untyped_storage()


_init_process_group, _storage_to_cpu = dist.init_process_group, torch.UntypedStorage.cpu


def install() -> None:
    """Put all of it in place."""
    for name, value in {**PATCHES, **MEMORY_PATCHES}.items():
        setattr(torch.cuda, name, value)
    for name, value in MEMORY_PATCHES.items():
        setattr(torch.cuda.memory, name, value)
    for name in ("current_device", "current_stream", "_lazy_init", "_lazy_call", "device_count"):
        for module in (torch.cuda.random, torch.cuda.memory):
            if hasattr(module, name):
                setattr(module, name, PATCHES[name])
    torch.Event = Event
    torch.accelerator.current_stream = current_stream
    torch.accelerator.synchronize = lambda device=None: backend.wait("accelerator.synchronize", debugged=False)
    torch._C._cuda_getCurrentRawStream = lambda device=0: current_stream(device).stream_id
    torch.UntypedStorage.cpu = storage_to_cpu
    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
    for name, module in list(sys.modules.items()):
        if name.startswith("torch.distributed.fsdp._fully_shard."):
            for function in (alloc_storage, free_storage):
                if hasattr(module, function.__name__):
                    setattr(module, function.__name__, function)


install()
sys.modules["torch.func._random"] = None  # its kernels are for CUDA alone
importlib.import_module("fake_kernels")
