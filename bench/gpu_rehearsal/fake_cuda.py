"""A machine with GPUs that are not there: tensors on `cuda` have shapes, types and storages, and no numbers.

    with Machine(gpu, 4) as machine:      torch.cuda and torch.distributed are those of rank 0 of 4
        with machine.fake_tensors():      what is made in here is on the GPU, and counted
            ...
    machine.peak_bytes                    what torch's allocator would have held at the most

This file and cuda_guard.cpp are the only ones that stand on private names of torch. They were made for torch 2.13.0,
its build for CPUs, and g++; without these, importing this file ends the process with exit code 78. It must be
imported before torch, whose C++ asks only once whether there is CUDA.
"""

import contextlib
import copy
import ctypes
import dataclasses
import functools
import importlib.metadata
import importlib.util
import pickle
import shutil
import subprocess
import sys
import tempfile
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

MADE_FOR = "2.13.0"
GUARD = Path(__file__).with_name("cuda_guard.cpp")
CANNOT_RUN = 78


def find_problem(version: str, library: Path) -> str:
    """Say why this torch or this machine cannot have the stand-in; "" if it can."""
    if version.partition("+")[0] != MADE_FOR:
        return f"it stands on private names of torch {MADE_FOR}, and this is torch {version}"
    if (library / "libtorch_cuda.so").exists():
        return f"torch {version} is a CUDA build. Install the one for CPUs: make setup TORCH_BACKEND=cpu"
    if shutil.which("g++") is None:
        return "there is no C++ compiler. Install g++"
    return ""


def load_guard() -> None:
    """Compile cuda_guard.cpp and load it, in a few seconds. Exits with 78 where that is not possible."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    torch_folder = Path(spec.submodule_search_locations[0])
    library = torch_folder / "lib"
    if problem := find_problem(importlib.metadata.version("torch"), library):
        sys.stderr.write(f"gpu-rehearsal cannot run here: {problem}.\n")
        sys.exit(CANNOT_RUN)
    with tempfile.TemporaryDirectory() as folder:
        guard = f"{folder}/cuda_guard.so"
        command = ["g++", "-std=c++20", "-shared", "-fPIC", str(GUARD), "-o", guard]
        command += [f"-I{torch_folder}/include", f"-L{library}", "-ltorch_cpu", "-lc10"]
        subprocess.run(command, check=True)
        for name in ("libc10.so", "libtorch_cpu.so"):
            ctypes.CDLL(str(library / name), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(guard)


load_guard()

import torch  # noqa: E402
import torch.cuda._pin_memory_utils as pinning  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from torch._subclasses import fake_tensor  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # noqa: E402
from torch.distributed import device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.nn.parallel import distributed as ddp  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402
from torch.utils._python_dispatch import (  # noqa: E402
    TorchDispatchMode,
    _disable_current_modes,
)
from torch.utils._pytree import tree_iter  # noqa: E402

aten = torch.ops.aten
ALLOCATED_IN = 512  # bytes: torch's allocator rounds up to these
KNOWN_NUMBERS = 8  # so large a tensor on the CPU, made of a list, keeps its numbers: what processes tell each other
CUDNN = 92000  # the version of cuDNN that torch 2.13 comes with, as it writes it


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A model of GPU.

    Attributes:
        name: as torch has it.
        capability: its compute capability.
        processors: streaming multiprocessors; threads: that one of them has.
        shared_bytes: shared memory that a block of threads may take.
    """

    name: str
    memory_bytes: int
    capability: tuple[int, int]
    processors: int
    threads: int
    shared_bytes: int


# ---------------------------------------------------------------------------------------------------
# Tensors
# ---------------------------------------------------------------------------------------------------


class Tracker(TorchDispatchMode):
    """Watches all operations: counts bytes on the GPU, and reads of it by the host, which it answers.

    Attributes:
        answer: what the host reads, in place of any number on the GPU.
        kernels: name of an attention kernel -> calls.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.peak_bytes = 0
        self.peak_operation = ""
        self.reads = 0
        self.answer = 1.0
        self.kernels: Counter[str] = Counter()
        self.operation = ""
        self.sizes: dict[int, int] = {}  # of storages, by address

    def resize(self, address: int, size: int) -> None:
        """A storage has another size; 0: it was freed."""
        size = -(-size // ALLOCATED_IN) * ALLOCATED_IN
        self.bytes += size - self.sizes[address]
        self.sizes[address] = size
        if self.bytes > self.peak_bytes:
            self.peak_bytes = self.bytes
            self.peak_operation = self.operation

    def forget(self, address: int) -> None:
        self.resize(address, 0)
        del self.sizes[address]

    def track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self.sizes:
            self.sizes[address] = 0
            weakref.finalize(storage, self.forget, address)
        self.resize(address, storage.nbytes())

    def read(self, tensor: Tensor, shape: tuple[int, ...]) -> Any:
        """Return what the host reads: a number, or nested lists of this shape."""
        if tensor.device.type == "cuda":
            self.reads += 1
        value: Any = self.answer
        if tensor.dtype is torch.bool:
            value = bool(value)
        elif not tensor.dtype.is_floating_point:
            value = int(value)
        for size in reversed(shape):
            value = [value] * size
        return value

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Have torch.compile trace what is inside of it all the same."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it calls again with its local tensors
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            return self.read(args[0], ())
        if func in (aten.is_pinned.default, aten._pin_memory.default):
            if args[0].device.type != "cpu":
                raise RuntimeError(f"only CPU tensors can be pinned, not one on {args[0].device}")
            return True if func is aten.is_pinned.default else args[0].clone()
        self.operation = str(func)
        result = func(*args, **kwargs)
        if func is aten._to_copy.default and args[0].device.type == "cuda":
            self.reads += result.device.type == "cpu"
        for tensor in tree_iter(result):
            if isinstance(tensor, FakeTensor) and tensor.device.type == "cuda":
                self.track(tensor)
        return result


def choose_attention(q: Tensor, k: Tensor, mask: Tensor | None, causal: bool, gpu: Gpu) -> str:
    """Return the kernel that torch's CUDA build takes, in an abridged version of its rules (sdp_utils.cpp)."""
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    width = q.shape[-1]
    is_grouped = q.shape[1] != k.shape[1]
    fits = {
        "flash": is_half
        and width <= 256
        and mask is None
        and not (causal and q.shape[2] != k.shape[2]),
        "efficient": width % (8 if is_half else 4) == 0
        and not (is_grouped and torch.is_grad_enabled()),
        "cudnn": is_half
        and width % 8 == 0
        and width <= 128
        and k.shape[2] > 1
        and gpu.capability == (9, 0)
        and torch.backends.cuda.cudnn_sdp_enabled(),
    }
    for name in ("cudnn", "flash", "efficient"):
        if fits[name]:
            return name
    return "math"


def attention_of(gpu: Gpu, kernels: Counter[str]) -> Callable[..., Tensor]:
    """Return scaled_dot_product_attention as it is on this GPU; torch's CPU build has no rule for one."""

    def attend(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        for other in (k, v):
            if (other.dtype, other.device) != (q.dtype, q.device):
                raise RuntimeError(
                    f"query is {q.dtype} on {q.device}, and key or value {other.dtype} on {other.device}"
                )
        groups = q.shape[1] // k.shape[1]
        if groups != 1 and not enable_gqa:
            raise RuntimeError(
                f"{q.shape[1]} heads of query and {k.shape[1]} of key, no enable_gqa"
            )
        if attn_mask is not None:
            if is_causal:
                raise RuntimeError("attn_mask and is_causal at once")
            if attn_mask.dtype not in (torch.bool, q.dtype) or attn_mask.device != q.device:
                raise RuntimeError(f"attn_mask is {attn_mask.dtype} on {attn_mask.device}")
        name = choose_attention(q, k, attn_mask, is_causal, gpu)
        kernels[name] += 1
        options = (dropout_p, is_causal)
        if name == "math":
            y = aten._scaled_dot_product_attention_math(
                q, k, v, attn_mask, *options, scale=scale, enable_gqa=enable_gqa
            )
            return y[0]
        if name == "flash":
            y = aten._scaled_dot_product_flash_attention(q, k, v, *options, False, scale=scale)
            return y[0]
        bias = attn_mask
        if bias is not None:
            if bias.dtype is torch.bool:
                bias = torch.zeros_like(bias, dtype=q.dtype).masked_fill_(~bias, -torch.inf)
            bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        inputs: tuple[Tensor, ...] = (q, k, v)
        is_trained = torch.is_grad_enabled() and any(x.requires_grad for x in inputs)
        if name == "cudnn":
            y = aten._scaled_dot_product_cudnn_attention(
                *inputs, bias, is_trained, *options, False, scale=scale
            )
            return y[0]
        if groups != 1:
            inputs = (q, *(x.repeat_interleave(groups, dim=1) for x in (k, v)))
        y = aten._scaled_dot_product_efficient_attention(
            *inputs, bias, is_trained, *options, scale=scale
        )
        return y[0]

    return attend


def never_called(*_: Any) -> Any:
    """Stand for a kernel: fake tensors take its shapes from elsewhere."""
    raise NotImplementedError


# torch's CUDA build has kernels for these. Without, the CPU build would take them apart, which holds more at once.
KERNELS = torch.library.Library("aten", "IMPL", "CUDA")
for operation in ("silu_backward", "_fused_rms_norm", "_fused_rms_norm_backward"):
    KERNELS.impl(operation, never_called)


# ---------------------------------------------------------------------------------------------------
# torch.cuda
# ---------------------------------------------------------------------------------------------------


class Event:
    """torch.cuda.Event; a millisecond passes from one to the next."""

    def __init__(self, enable_timing: bool = False, **_: Any):
        self.is_timed = enable_timing
        self.is_recorded = False

    def record(self, stream: Any = None) -> None:
        self.is_recorded = True

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "Event") -> float:
        for event in (self, end):
            if not (event.is_timed and event.is_recorded):
                raise RuntimeError("both events must be recorded, and made with enable_timing=True")
        return 1.0


class Stream:
    """torch.cuda.Stream; all are the same one."""

    device = torch.device("cuda", 0)
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any): ...

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, event: Any = None) -> Event:
        event = event or Event()
        event.record()
        return event

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None: ...


def patch(stack: contextlib.ExitStack, owner: Any, **values: Any) -> None:
    for name, value in values.items():
        stack.enter_context(mock.patch.object(owner, name, value))


def returns(value: Any) -> Callable[..., Any]:
    """Return a function that takes anything and returns the value."""
    return lambda *_, **__: value


def cuda_functions(gpu: Gpu, gpus: int, tracker: Tracker) -> dict[str, Any]:
    """Return what torch.cuda is on a machine with so many of these GPUs, of which the first is used."""
    properties = types.SimpleNamespace(
        name=gpu.name,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        total_memory=gpu.memory_bytes,
        multi_processor_count=gpu.processors,
        max_threads_per_multi_processor=gpu.threads,
        regs_per_multiprocessor=65536,
        warp_size=32,
        shared_memory_per_block_optin=gpu.shared_bytes,
        gcnArchName="",
    )
    same_stream = returns(Stream())
    return {
        "is_available": returns(True),
        "is_initialized": returns(True),
        "_lazy_init": returns(None),
        "device_count": returns(gpus),
        "current_device": returns(0),
        "set_device": returns(None),
        "_exchange_device": returns(0),
        "_maybe_exchange_device": returns(0),
        "get_device_name": returns(gpu.name),
        "get_device_capability": returns(gpu.capability),
        "get_device_properties": returns(properties),
        "is_bf16_supported": returns(True),
        "Event": Event,
        "Stream": Stream,
        "stream": returns(contextlib.nullcontext()),
        "set_stream": returns(None),
        "current_stream": same_stream,
        "default_stream": same_stream,
        "synchronize": returns(None),
        "empty_cache": returns(None),
        "max_memory_allocated": lambda *_: tracker.peak_bytes,
        "memory_allocated": lambda *_: tracker.bytes,
        "mem_get_info": returns((gpu.memory_bytes, gpu.memory_bytes)),
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": returns(None),
        "nccl": types.SimpleNamespace(version=returns((2, 29, 7))),
    }


# ---------------------------------------------------------------------------------------------------
# torch.compile
# ---------------------------------------------------------------------------------------------------


class Compiler(contextlib.ExitStack):
    """torch.compile for a card that is not there.

    Dynamo and AOTAutograd trace; a graph break is an error. Where the package triton is there, inductor writes kernels,
    and Triton compiles them with the ptxas that it brings. What is then called is the traced graph. DDP's splitting of
    graphs by its buckets is left out: it loses the fake tensors.

    Attributes:
        graphs: that were traced, forward and backward.
        kernels: of Triton's, that were compiled.
        shared_bytes: most shared memory that one of them takes.
    """

    def __init__(self, gpu: Gpu):
        super().__init__()
        self.gpu = gpu
        self.graphs = 0
        self.kernels = 0
        self.shared_bytes = 0
        self.has_triton = importlib.util.find_spec("triton") is not None

    def __enter__(self) -> "Compiler":
        super().__enter__()
        import torch._dynamo.config as dynamo
        import torch._inductor.config as inductor

        folder = self.enter_context(tempfile.TemporaryDirectory())
        caches = dict.fromkeys(("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"), folder)
        self.enter_context(mock.patch.dict("os.environ", caches))
        self.enter_context(dynamo.patch(optimize_ddp=False))
        # constants would be computed, and a launcher loads what was compiled
        self.enter_context(inductor.patch(joint_graph_constant_folding=False))
        self.enter_context(inductor.patch(use_static_triton_launcher=False))
        self.enter_context(inductor.patch(compile_threads=1, force_disable_caches=True))
        compiled = functools.partial(torch.compile, fullgraph=True, backend=self.compile)
        patch(self, torch, compile=compiled)
        # which counts its calls, and is not looked into
        torch._dynamo.allow_in_graph(torch.nn.functional.scaled_dot_product_attention)
        self.callback(torch._dynamo.reset)
        if self.has_triton:
            self.patch_inductor()
        return self

    def patch_inductor(self) -> None:
        """Have inductor and Triton find the card, and hand over each kernel."""
        from torch._dynamo.device_interface import CudaInterface
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.runtime import hints, triton_helpers
        from triton.backends.compiler import GPUTarget
        from triton.runtime import driver

        major, minor = self.gpu.capability
        target = GPUTarget("cuda", 10 * major + minor, 32)
        driver.set_active(mock.Mock(get_current_target=returns(target)))
        hints.DeviceProperties.create.cache_clear()  # of the card before
        names = ("current_device", "device_count", "current_stream", "get_device_properties")
        answers = {name: staticmethod(getattr(torch.cuda, name)) for name in names}
        patch(self, CudaInterface, get_raw_stream=returns(0), **answers)
        torch._C._cuda_getCurrentRawStream = returns(0)  # what is generated imports it
        patch(self, AsyncCompile, triton=self.compile_kernel)
        patch(self, triton_helpers, set_driver_to_gpu=returns(None))

    def compile(self, graph: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs, inner_compile=self.compile_graph)

    def compile_graph(self, graph: Any, inputs: Any, **options: Any) -> Any:
        from functorch.compile import make_boxed_func
        from torch._inductor.compile_fx import compile_fx_inner

        self.graphs += 1
        if self.has_triton:
            compile_fx_inner(copy.deepcopy(graph), inputs, **options)
        return make_boxed_func(graph)

    def compile_kernel(self, name: str, source: str, **_: Any) -> Any:
        """Compile a kernel for the card. Of its configurations torch drops those that do not fit; one must."""
        from torch._inductor.async_compile import _load_triton_kernel_from_source

        tuner = _load_triton_kernel_from_source(name, source)
        for config in tuner.configs:
            taken = tuner._precompile_config(config).kernel.metadata.shared
            if taken <= self.gpu.shared_bytes:
                self.kernels += 1
                self.shared_bytes = max(self.shared_bytes, taken)
                return tuner
        raise RuntimeError(
            f"{name}: {taken} bytes of shared memory, and {self.gpu.name} has {self.gpu.shared_bytes}"
        )


# ---------------------------------------------------------------------------------------------------
# torch.distributed
# ---------------------------------------------------------------------------------------------------


def really(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes with real tensors, also among fake ones."""

    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        with _disable_current_modes():
            return function(*arguments, **options)

    return call


def same_of_all(values: list[Any], value: Any, **_: Any) -> None:
    """all_gather_object where all processes say the same."""
    values[:] = [pickle.loads(pickle.dumps(value)) for _ in values]


def gather_same(value: Any, values: list[Any] | None = None, **_: Any) -> None:
    """gather_object where all processes say the same."""
    if values is not None:
        same_of_all(values, value)


def reduce_bucket(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's all-reduce; that of the fake group has no result, which DDP refuses."""
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


# ---------------------------------------------------------------------------------------------------
# The machine
# ---------------------------------------------------------------------------------------------------


class Machine(contextlib.ExitStack):
    """A machine with GPUs, and this process as rank 0 of a job on them, a process each."""

    def __init__(self, gpu: Gpu, processes: int):
        super().__init__()
        self.gpu = gpu
        self.processes = processes
        self.tracker = Tracker()

    def __enter__(self) -> "Machine":
        super().__enter__()
        patch(self, torch.cuda, **cuda_functions(self.gpu, self.processes, self.tracker))
        patch(self, torch.backends.cudnn, version=returns(CUDNN))
        patch(self, pinning, pin_memory=returns(None), unpin_memory=returns(None))
        patch(
            self,
            torch.nn.functional,
            scaled_dot_product_attention=attention_of(self.gpu, self.tracker.kernels),
        )
        self.patch_tensors()
        self.patch_processes()
        self.callback(self.leave)
        return self

    @staticmethod
    def leave() -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def patch_tensors(self) -> None:
        """Replace what asks for a GPU's numbers, or for its memory."""
        tracker = self.tracker
        resize_storage = torch.UntypedStorage.resize_
        real_list = Tensor.tolist
        real_new = Tensor.new_tensor

        def resize(storage: Any, size: int) -> Any:
            result = resize_storage(storage, size)
            if storage._cdata in tracker.sizes:
                tracker.resize(storage._cdata, size)
            return result

        def to_list(tensor: Any) -> Any:
            if not isinstance(tensor, FakeTensor):
                return real_list(tensor)
            if tensor.constant is not None:  # a small one on the CPU, whose numbers are known
                return real_list(tensor.constant)
            return tracker.read(tensor, tuple(tensor.shape))

        def new_tensor(tensor: Any, data: Any, **options: Any) -> Tensor:
            if not isinstance(tensor, FakeTensor):
                return real_new(tensor, data, **options)
            like: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
            return torch.tensor(data, **(like | options))

        patch(self, torch.UntypedStorage, resize_=resize)
        patch(self, FakeTensor, tolist=to_list)
        patch(self, Tensor, tolist=to_list, new_tensor=new_tensor, record_stream=returns(None))

    def patch_processes(self) -> None:
        """Make torch.distributed that of rank 0 of processes which all do the same."""
        real_init = dist.init_process_group
        real_new_group = dist.new_group
        real_reduce = dist.all_reduce
        real_ddp = ddp.DistributedDataParallel.__init__

        def init(*_: Any, **__: Any) -> None:
            real_init("fake", store=FakeStore(), rank=0, world_size=self.processes)

        def new_group(ranks: Any = None, **options: Any) -> Any:
            return real_new_group(ranks, group_desc=options.get("group_desc"))

        def all_reduce(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            if tensor.device.type == "cuda":
                return real_reduce(tensor, *arguments, **options)
            return None  # on the host the others add nothing

        def init_ddp(engine: Any, *arguments: Any, **options: Any) -> None:
            real_ddp(engine, *arguments, **options)
            engine.register_comm_hook(None, reduce_bucket)

        patch(
            self,
            dist,
            init_process_group=init,
            new_group=new_group,
            all_reduce=all_reduce,
            all_gather_object=same_of_all,
            gather_object=gather_same,
            broadcast_object_list=returns(None),
        )
        mesh = device_mesh.DeviceMesh
        names = ("__init__", "__getitem__", "get_coordinate", "get_local_rank", "_flatten")
        patch(self, mesh, **{name: really(getattr(mesh, name)) for name in names})
        patch(self, device_mesh, init_device_mesh=really(device_mesh.init_device_mesh))
        patch(self, ddp, _verify_param_shape_across_processes=returns(None))
        patch(self, ddp.DistributedDataParallel, __init__=init_ddp)
        patch(self, dist.Logger, set_runtime_stats_and_log=returns(None))
        patch(self, dist.Reducer, _rebuild_buckets=returns(False))

    @contextlib.contextmanager
    def fake_tensors(self) -> Iterator[Tracker]:
        """Make tensors without numbers inside, and track them."""
        no_device = property(returns(True))  # else FakeTensorMode makes a tensor on the GPU first
        with (
            mock.patch.object(FakeTensorMode, "avoid_device_init", no_device),
            mock.patch.object(fake_tensor, "CONSTANT_NUMEL_LIMIT", KNOWN_NUMBERS),
            FakeTensorMode(allow_non_fake_inputs=True),
            self.tracker,
        ):
            yield self.tracker
