"""A GPU that is not there: its tensors say "cuda" and keep their numbers on the CPU.

    with imagined_gpu() as gpu:
        x = torch.ones(3, device="cuda")
        x + torch.ones(3)                    # FakeTensor's error: cuda:0 and cpu
        float(x.sum())                       # 3.0, and one entry in gpu.streams.syncs

Every operation is first made on FakeTensors of the same devices, dtypes, shapes and strides, whose
checks are those of a real GPU (mixed devices, the layouts of fp8 products); then with the numbers.
So code that looks at values goes on, and what it computes can be compared with a CPU's. Streams,
events and graphs are those of tests.imagined_streams. pin_memory gives memory that counts as
pinned: a copy from or to it is not waited for.

`imagined_apple_gpu` is the same for "mps": without float64, pinned memory and copies that are not
waited for, and every call of torch.cuda is an error.

What it is not: kernels, their choice and their speed, NCCL, CUDA's own allocator and errors.
PyTorch's C++ takes these tensors for a CPU's, so what it decides by device it decides as there.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.nn import Buffer, Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tests.imagined_streams import HOST, Launch, OrderError, Span, Streams

GPU = torch.device("cuda", 0)
APPLE = torch.device("mps", 0)
CPU = torch.device("cpu")
aten = torch.ops.aten
# Files whose frames lie between an operation and who asked for it.
_BETWEEN = ("imagined_gpu.py", "torch/_compile.py", "torch/_dynamo/eval_frame.py", "torch/_ops.py")
# They look at values, so FakeTensors cannot say what comes out.
_LOOKS = (
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.equal.default,
    aten.masked_select.default,
)
# A GPU takes indices on the CPU, and copies them.
_TAKES_CPU_INDICES = (
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
)
_OF_CUDA = (
    "set_device",
    "current_device",
    "mem_get_info",
    "get_device_properties",
    "get_device_capability",
    "graph_pool_handle",
    "synchronize",
    "Stream",
    "Event",
    "CUDAGraph",
    "stream",
    "current_stream",
    "set_stream",
)
_PRODUCTS = (aten._scaled_mm.default, aten._int_mm.default)
_RUN = threading.Thread.run
_COPIES = (aten.copy_.default, aten._foreach_copy_.default, aten._to_copy.default)


class OnGpu(Tensor):
    """A tensor on the imagined GPU. host: its numbers, on the CPU."""

    host: Tensor
    gpu: ImaginedGpu

    @staticmethod
    def __new__(cls, host: Tensor, gpu: ImaginedGpu):
        made = Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=CPU,
        )
        made.host = host
        made.gpu = gpu
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        found = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, OnGpu)]
        return found[0].gpu.run(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:
        return self.gpu.device

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def __repr__(self, **_) -> str:
        return f"OnGpu({self.host})"

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def to(self, *args, **kwargs) -> Tensor:
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        copy = bool(kwargs.get("copy"))
        own = self.device
        there = own if device is None else torch.device(device.type, device.index or 0)
        if there.type == "cpu":
            there = CPU
        if there == own and dtype in (None, self.dtype) and not copy:
            return self
        return aten._to_copy(self, dtype=dtype, device=there, non_blocking=non_blocking)

    def cpu(self) -> Tensor:
        return self.to(CPU)

    def cuda(self) -> Tensor:
        return self

    def tolist(self) -> list:
        return self.cpu().tolist()

    def numpy(self, **_):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def untyped_storage(self):
        return Storage(self.host.untyped_storage(), self.gpu, self.device)

    def set_(self, source: Storage, offset: int, size, stride) -> OnGpu:
        """Return a tensor over memory that another one has."""
        return self.gpu.put(self.host.set_(source.host, offset, size, stride))


class Storage:
    """The storage of a tensor on the GPU, or of a pinned one."""

    def __init__(self, host: torch.UntypedStorage, gpu: ImaginedGpu, device: torch.device):
        self.host = host
        self.device = device
        self._gpu = gpu

    def nbytes(self) -> int:
        return self.host.nbytes()

    size = nbytes

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def _share_cuda_(self) -> tuple:
        """Stand in for CUDA IPC: a handle by which another process finds the memory."""
        handle = f"handle {len(self._gpu.shared)}".encode()
        self._gpu.shared[handle] = self
        return 0, handle, self.nbytes(), 0, b"counter", 0, b"event", True

    def _span(self) -> Span:
        return Span(self.host._cdata, 0, self.nbytes())

    def resize_(self, size: int) -> None:
        """Memory that is given back is the allocator's, in the order of this thread's stream."""
        streams = self._gpu.streams
        streams.touch(streams.current().name, Launch("resize", int, [], [self._span()]))
        streams.note(HOST, "resize")
        self.host.resize_(size)

    def copy_(self, source: Storage, non_blocking: bool = False) -> None:
        def copy() -> None:
            self.host.copy_(source.host)

        streams = self._gpu.streams
        launch = Launch("copy of a storage", copy, [source._span()], [self._span()])
        streams.launch(launch)
        if not non_blocking:
            streams.wait_for(streams.current(), "a copy that is waited for")


class Pinned(Tensor):
    """A tensor in pinned host memory."""

    gpu: ImaginedGpu
    __torch_function__ = torch._C._disabled_torch_function_impl

    def is_pinned(self, device=None) -> bool:
        return True

    def numpy(self, **options):
        host = self.as_subclass(Tensor)
        self.gpu.streams.touch_from_host("numpy", [Span.of(host)], [])
        return host.numpy(**options)

    def untyped_storage(self):
        return Storage(super().untyped_storage(), self.gpu, CPU)


_KINDS = {Tensor, Parameter, Buffer, OnGpu, Pinned, FakeTensor}


class _Mode(TorchDispatchMode):
    """Takes every operation of a thread: also those that make tensors."""

    def __init__(self, gpu: ImaginedGpu):
        super().__init__()
        self._gpu = gpu

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and to say so costs as much as the operation

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not set(types) <= _KINDS:
            return NotImplemented  # a tensor that is made of others takes itself apart
        return self._gpu.run(func, args, kwargs or {})


class _Names(TorchFunctionMode):
    """Gives "cuda" its number, which PyTorch would ask the driver for."""

    def __init__(self, device: torch.device):
        super().__init__()
        self._device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        if func is Tensor.cuda:
            return args[0].to(self._device)
        args, kwargs = tree_map(self._numbered, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _numbered(self, x):
        if not isinstance(x, (str, torch.device)):
            return x
        is_named = x == self._device.type if isinstance(x, str) else x.type == self._device.type
        return self._device if is_named else x


class ImaginedGpu:
    """The device: what was launched, and its tensors."""

    def __init__(self, device: torch.device = GPU):
        self.device = device
        self.streams = Streams()
        self.allocated: list[int] = []  # bytes of each tensor that was made on it
        # Quantised products with their arguments, which PyTorch has taken for a GPU's.
        self.products: list[tuple[object, tuple]] = []
        self._fake = FakeTensorMode(allow_non_fake_inputs=False)
        self.collectives: list[tuple[str, int]] = []  # each with the bytes of its tensors
        self.shared: dict[bytes, Storage] = {}  # what was shared with other processes, by handle
        self._checks: dict[tuple, object] = {}  # what FakeTensors made of an operation
        self._pinned: set[int] = set()
        self._kept: list[torch.UntypedStorage] = []  # so that no two storages share an address
        self._known: set[int] = set()
        self._lock = threading.RLock()
        self._entered = threading.local()

    def enter_thread(self, device=None) -> None:
        """Take all operations of this thread from now on, if not yet."""
        if not getattr(self._entered, "mode", None):
            self._entered.mode = contextlib.ExitStack()
            self._entered.mode.enter_context(_Mode(self))
            self._entered.mode.enter_context(_Names(self.device))

    def leave_thread(self) -> None:
        """Undo enter_thread."""
        mode = self._entered.mode
        self._entered.mode = None
        mode.close()

    def open_shared(self, device: int, handle: bytes, num_bytes: int, offset: int, *_) -> Storage:
        """Stand in for UntypedStorage._new_shared_cuda."""
        storage = self.shared[handle]
        assert (device, num_bytes, offset) == (0, storage.nbytes(), 0)
        return storage

    def memory_allocated(self, device=None) -> int:
        """Return the bytes of all tensors on it. None is freed but by resizing."""
        on_device = [s for s in self._kept if s._cdata not in self._pinned]
        return sum(storage.nbytes() for storage in on_device)

    def run_thread(self, thread: threading.Thread) -> None:
        """Run a thread of the product's, in which the GPU is there too."""
        self.enter_thread()
        try:
            _RUN(thread)
        finally:
            self.leave_thread()

    def put(self, host: Tensor) -> OnGpu:
        """Return a tensor on the GPU with these numbers, which it takes over."""
        self._keep(host)
        return OnGpu(host, self)

    def run(self, func, args, kwargs):
        """Make one operation: check it, and then with numbers."""
        if func.namespace == "c10d":
            given = [x for x in tree_flatten(args)[0] if isinstance(x, Tensor)]
            self.collectives.append((str(func), sum(x.nbytes for x in given)))
        leaves, _ = tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        wanted = kwargs.get("device")
        is_of_host = tensors and not any(isinstance(x, OnGpu) for x in tensors)
        if wanted == CPU and not is_of_host and _is_asked_by_autograd():
            # Its formulas make tensors where they take the others to be.
            kwargs = {**kwargs, "device": self.device}
            wanted = self.device
        own = self.device.type
        makes_there = any(isinstance(x, torch.device) and x.type == own for x in leaves)
        makes_there |= wanted == self.device
        pins = bool(kwargs.get("pin_memory"))
        assert not (pins and own == "mps"), "an Apple GPU shares the host's memory: nothing to pin"
        if not makes_there and not any(isinstance(x, OnGpu) for x in tensors):
            return self._run_on_host(func, args, kwargs, tensors, pins=pins)
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with _Mode(self):  # in inference mode nobody has taken it apart yet
                return func.decompose(*args, **kwargs)
        # No tensor on it is an inference tensor: these cannot be views of others.
        with self._lock, torch.inference_mode(False), torch.no_grad():
            return self._run_on_gpu(func, args, kwargs, tensors)

    def _run_on_host(self, func, args, kwargs, tensors: list[Tensor], *, pins: bool):
        if func in (aten.is_pinned.default, aten.pin_memory.default, aten._pin_memory.default):
            is_pinned = isinstance(args[0], Pinned)
            if func is aten.is_pinned.default:
                return is_pinned
            return args[0] if is_pinned else self._pin(_plain(args[0]).detach().clone())
        given = {**kwargs, "pin_memory": False} if pins else kwargs
        shared = [x for x in tensors if isinstance(x, Pinned)]
        if shared and not func.is_view:
            reads, writes = _spans(func, args, kwargs)
            self.streams.touch_from_host(str(func), reads, writes)
        out = func(*tree_map(_plain, args), **tree_map(_plain, given))
        if not (pins or shared):
            return out
        return tree_map(lambda one: self._pinned_again(one, always=pins), out)

    def _pinned_again(self, out, *, always: bool):
        """Return a result that lies in pinned memory as a tensor that says so."""
        if not isinstance(out, Tensor):
            return out
        if always or out.untyped_storage()._cdata in self._pinned:
            return self._pin(out)
        return out

    def _pin(self, host: Tensor) -> Pinned:
        self._keep(host)
        self._pinned.add(host.untyped_storage()._cdata)
        pinned = Tensor._make_subclass(Pinned, host)
        pinned.gpu = self
        return pinned

    def _keep(self, host: Tensor) -> None:
        storage = host.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._kept.append(storage)

    def _run_on_gpu(self, func, args, kwargs, tensors: list[Tensor]):
        faked = self._checked(func, args, kwargs)
        if func in _PRODUCTS:
            self.products.append((func, args))
        host_args, host_kwargs = tree_map(_host_of, (args, dict(kwargs)))
        if host_kwargs.get("device") is not None:
            host_kwargs["device"] = CPU
        host_kwargs.pop("pin_memory", None)
        compute = _scaled_product if func is aten._scaled_mm.default else func
        to_host = isinstance(faked, Tensor) and faked.device == CPU
        if func is aten._foreach_copy_.default:
            to_host = not all(isinstance(x, OnGpu) for x in args[0])
        self._look(func, args, tensors, to_host=to_host)
        reads, writes = _spans(func, args, kwargs)
        graph = self.streams.capturing
        if func.is_view or func is aten.detach.default or func is aten.lift_fresh.default:
            return tree_map(self._wrap, func(*host_args, **host_kwargs))
        if graph is None:
            out = []

            def run() -> None:
                out.append(compute(*host_args, **host_kwargs))

            # What it makes nobody else has seen: only what was there can be raced for.
            self.streams.launch(Launch(str(func), run, reads, writes))
            self._wait_if_it_must(func, args, kwargs, tensors, to_host=to_host)
            if func is aten.log_sigmoid_forward.default:
                faked = (faked[0], None)  # what it keeps for backward is a CPU's alone
            return self._result(out[0], faked, tensors)
        assert faked is not None, f"{func} looks at values amid a capture"
        return self._captured(func, compute, faked, host_args, host_kwargs, reads, writes, tensors)

    def _captured(self, func, compute, faked, args, kwargs, reads, writes, tensors):
        """Put an operation into the graph. Its results are memory that a replay fills."""
        if _writes(func):
            self.streams.launch(Launch(str(func), lambda: func(*args, **kwargs), reads, writes))
            written = kwargs.get("out", args[0]) if func._schema.returns else None
            return self._result(written, faked, tensors)
        outs = tree_map(_room_for, faked)

        def run() -> None:
            computed = compute(*args, **kwargs)
            for target, value in zip(tree_flatten(outs)[0], tree_flatten(computed)[0]):
                if isinstance(target, Tensor):
                    target.copy_(value)

        made = [Span.of(x) for x in tree_flatten(outs)[0] if isinstance(x, Tensor)]
        self.streams.launch(Launch(str(func), run, reads, [*writes, *made]))
        return tree_map(self._wrap, outs)

    def _checked(self, func, args, kwargs):
        """Return what FakeTensors make of it; None if that depends on values."""
        if _looks(func, args) or func.namespace == "c10d":
            _assert_one_device(func, args)
            return None
        given = args
        if func in _TAKES_CPU_INDICES:
            there = [self._index(x) for x in args[1]]
            given = (args[0], there, *args[2:])
        key = (func, *map(_kind_of, tree_flatten((given, kwargs))[0]))
        if key not in self._checks:
            self._checks[key] = self._checked_anew(func, given, kwargs)
        return self._checks[key]

    def _checked_anew(self, func, given, kwargs):
        with self._fake:
            fake_args, fake_kwargs = tree_map(self._faked, (given, dict(kwargs)))
            out = fake_kwargs.get("out")
            if out is not None and func._overloadname == "out":
                # FakeTensors copy into `out`, for which they would want a real GPU.
                del fake_kwargs["out"]
                made = func.overloadpacket.default(*fake_args, **fake_kwargs)
                wanted = (out.device, out.dtype, out.shape)
                assert (made.device, made.dtype, made.shape) == wanted, f"{func}: {made} in {out}"
                return out
            try:
                return func(*fake_args, **fake_kwargs)
            except (DataDependentOutputException, DynamicOutputShapeException):
                _assert_one_device(func, given)
                return None

    def _faked(self, x):
        if not isinstance(x, Tensor):
            return x
        if isinstance(x, FakeTensor):
            return x
        host = _host_of(x)
        device = self.device if isinstance(x, OnGpu) else CPU
        meta = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device="meta")
        return FakeTensor(self._fake, meta, device)

    def _index(self, x):
        """Return an index, which a GPU would copy to itself."""
        return x if not isinstance(x, Tensor) or isinstance(x, OnGpu) else OnGpu(x, self)

    def _look(self, func, args, tensors, *, to_host: bool) -> None:
        """Refuse what cannot be captured."""
        if self.streams.capturing is None:
            return
        hosts = [x for x in tensors if not isinstance(x, OnGpu) and x.dim()]
        if _looks(func, args) or to_host or (func in _COPIES and hosts):
            raise OrderError(f"{func} amid a capture: it waits for the device, or for the host")

    def _wait_if_it_must(self, func, args, kwargs, tensors, *, to_host: bool) -> None:
        """The host waits for values that it looks at, for copies that are not asynchronous, and for
        those to memory that is not pinned.
        """
        streams = self.streams
        if _looks(func, args):
            streams.wait_for(streams.current(), str(func))
        names = [argument.name for argument in func._schema.arguments]
        is_async = bool({**dict(zip(names, args)), **kwargs}.get("non_blocking"))
        hosts = [x for x in tensors if not isinstance(x, OnGpu)]
        if is_async and (hosts or to_host) and self.device == APPLE:
            raise OrderError(f"{func}: nothing waits for this copy")
        is_pinned = all(isinstance(x, Pinned) for x in hosts)
        if func not in _COPIES:
            return
        if to_host and not (is_async and hosts and is_pinned):
            streams.wait_for(streams.current(), f"{func} to the CPU")
        elif hosts and not to_host and not is_async:
            streams.wait_for(streams.current(), f"{func} from the CPU")

    def _result(self, out, faked, tensors: list[Tensor]):
        """Return what came out, on its device; what was written in place is what was given."""
        given = {id(_host_of(x)): x for x in tensors}
        outs, spec = tree_flatten(out)
        fakes = [None] * len(outs) if faked is None else tree_flatten(faked)[0]
        results = []
        for value, fake in zip(outs, fakes):
            if not isinstance(value, Tensor):
                results.append(value)
            elif id(value) in given:
                results.append(given[id(value)])
            elif fake is not None and fake.device == CPU:
                results.append(value)
            else:
                if fake is not None:
                    same = (fake.dtype, tuple(fake.shape)) == (value.dtype, tuple(value.shape))
                    assert same, f"a GPU makes {fake}, this CPU {value.dtype} {value.shape}"
                self.allocated.append(value.nbytes)
                results.append(self._wrap(value))
        return tree_unflatten(results, spec)

    def _wrap(self, value):
        if isinstance(value, Tensor) and not isinstance(value, OnGpu):
            if self.device == APPLE and value.dtype == torch.float64:
                raise TypeError("the MPS framework doesn't support float64")
            return self.put(value)
        return value


def _is_asked_by_autograd() -> bool:
    """Whether an operation comes from a C++ formula of the backward pass, and from no Python."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.endswith(_BETWEEN):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.endswith("torch/autograd/graph.py")


def _kind_of(x):
    """All that a check sees of an argument."""
    if not isinstance(x, Tensor):
        return type(x), x
    host = _host_of(x)
    return isinstance(x, OnGpu), host.dtype, host.shape, host.stride()


def _plain(x):
    if isinstance(x, Pinned):
        return x.as_subclass(Tensor)
    return x


def _host_of(x):
    if isinstance(x, OnGpu):
        return x.host
    return _plain(x)


def _scaled_product(a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, *_):
    """_scaled_mm in numbers: not every torch's CPU takes a scale for each row."""
    assert bias is None and scale_result is None, "we give neither"
    return (a.float() @ b.float() * scale_a * scale_b).to(out_dtype)


def _writes(func) -> bool:
    return any(a.alias_info and a.alias_info.is_write for a in func._schema.arguments)


def _spans(func, args, kwargs) -> tuple[list[Span], list[Span]]:
    """Return (what is read, what is written) of the tensors on the GPU and the pinned ones."""
    reads: list[Span] = []
    writes: list[Span] = []
    names = [a.name for a in func._schema.arguments]
    given = {**dict(zip(names, args)), **kwargs}
    for argument in func._schema.arguments:
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        for x in tree_flatten(given.get(argument.name))[0]:
            if isinstance(x, (OnGpu, Pinned)):
                span = Span.of(_host_of(x))
                (writes if is_written else reads).append(span)
    return reads, writes


def _looks(func, args) -> bool:
    """Whether what comes out depends on values, so that the host must wait for them."""
    if func in (aten.index.Tensor, aten.index_put_.default):
        return any(isinstance(x, Tensor) and x.dtype == torch.bool for x in args[1])
    return func in _LOOKS


def _assert_one_device(func, args) -> None:
    devices = {x.device for x in tree_flatten(args)[0] if isinstance(x, Tensor) and x.dim()}
    assert len(devices) <= 1, f"{func} of tensors on {devices}"


def _room_for(fake):
    """Memory for a result, full of what nobody should read."""
    if not isinstance(fake, Tensor):
        return fake
    room = torch.empty_strided(fake.shape, fake.stride(), dtype=fake.dtype)
    bits = room.as_strided((room.untyped_storage().nbytes() // room.itemsize,), (1,))
    bits.view(torch.uint8).fill_(0xFF)
    return room


@contextlib.contextmanager
def imagined_gpu(capability: tuple[int, int] = (9, 0)) -> Iterator[ImaginedGpu]:
    """One GPU, for the block. torch.cuda says that it is there."""
    gpu = ImaginedGpu()
    streams = gpu.streams
    facts = SimpleNamespace(uuid="GPU-imagined", total_memory=80 << 30, name="an imagined GPU")
    stand_ins: dict[str, Callable] = {
        "is_available": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": gpu.enter_thread,
        "get_device_capability": lambda device=None: capability,
        "get_device_properties": lambda device=None: facts,
        "get_device_name": lambda device=None: facts.name,
        "mem_get_info": lambda device=None: (facts.total_memory, facts.total_memory),
        "empty_cache": lambda: None,
        "memory_allocated": gpu.memory_allocated,
        "graph_pool_handle": object,
        "is_current_stream_capturing": lambda: streams.capturing is not None,
        "synchronize": streams.synchronize,
        "Stream": streams.make_stream,
        "Event": streams.make_event,
        "CUDAGraph": streams.make_graph,
        "stream": streams.on,
        "current_stream": streams.current,
        "set_stream": streams.set_current,
    }
    with contextlib.ExitStack() as stack:
        for name, stand_in in stand_ins.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, stand_in))
        opened = staticmethod(gpu.open_shared)
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "_new_shared_cuda", opened))
        stack.enter_context(_entered(gpu))
        yield gpu


@contextlib.contextmanager
def untouchable_gpu(*, is_there: bool = True) -> Iterator[None]:
    """A GPU that torch.cuda says is there or is not, and every other call of which is an error."""
    with contextlib.ExitStack() as stack:
        for name in _OF_CUDA:
            no = mock.Mock(side_effect=AssertionError(f"torch.cuda.{name} is called"))
            stack.enter_context(mock.patch.object(torch.cuda, name, no))
        stack.enter_context(mock.patch.object(torch.cuda, "is_available", lambda: is_there))
        yield


@contextlib.contextmanager
def imagined_apple_gpu() -> Iterator[ImaginedGpu]:
    """A Mac's GPU, for the block. torch.backends.mps says that it is there."""
    gpu = ImaginedGpu(APPLE)
    with contextlib.ExitStack() as stack:
        stack.enter_context(untouchable_gpu(is_there=False))
        for module, name, value in (
            (torch.backends.mps, "is_available", True),
            (torch.mps, "recommended_max_memory", 16 << 30),
            (torch.mps, "driver_allocated_memory", 0),
        ):
            said = mock.Mock(return_value=value)
            stack.enter_context(mock.patch.object(module, name, said))
        stack.enter_context(_entered(gpu))
        yield gpu


@contextlib.contextmanager
def _entered(gpu: ImaginedGpu) -> Iterator[None]:
    """Have a device for a block, in this thread and those that it starts."""
    with contextlib.ExitStack() as stack:
        threads = mock.patch.object(threading.Thread, "run", lambda thread: gpu.run_thread(thread))
        stack.enter_context(threads)
        nothing = mock.patch.object(torch._C, "_host_emptyCache", lambda: None, create=True)
        stack.enter_context(nothing)
        # A PyTorch built for CUDA would look for a driver.
        ready = mock.patch.object(fake_tensor, "init_gpu_context", lambda device: None)
        stack.enter_context(ready)
        overwrites = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        lifted = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)
        gpu.enter_thread()
        try:
            yield
        finally:
            gpu.leave_thread()
            torch._C._set_only_lift_cpu_tensors(lifted)
            torch.__future__.set_overwrite_module_params_on_conversion(overwrites)


__all__ = [
    "APPLE",
    "CPU",
    "GPU",
    "HOST",
    "ImaginedGpu",
    "OnGpu",
    "OrderError",
    "imagined_apple_gpu",
    "imagined_gpu",
    "untouchable_gpu",
]
