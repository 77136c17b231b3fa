"""Makes this process believe in one NVIDIA GPU, on which tensors have shapes alone.

What asks for the device is answered as an H100 would; what computes needs `FakeTensorMode`. The
process is changed for good, so that tests do this in a process of their own.
"""

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch

from tests.cuda.guard import load_guard

DEVICE = torch.device("cuda", 0)


class Stream:
    """A stream or an event, neither of which has anything to wait for."""

    device, device_index, device_type = DEVICE, 0, 1
    cuda_stream = stream_id = 0
    waits = 0
    """how often the host waited for a stream or an event"""

    def __init__(self, *_, **__):
        pass

    def synchronize(self):
        Stream.waits += 1

    def record_event(self, event=None):
        return event or Stream()

    def query(self):
        return True

    def nothing(self, *_, **__):
        pass

    record = wait = wait_event = wait_stream = nothing


def add_device(capability=(9, 0)):
    """Make CUDA appear available, with one device of a compute capability."""
    load_guard().add_imaginary_device()
    name, memory = "NVIDIA H100 80GB HBM3", 80 * 2**30
    properties = SimpleNamespace(
        name=name,
        total_memory=memory,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=132,
    )
    state = torch.zeros(16, dtype=torch.uint8)

    @contextmanager
    def stream(_):
        yield

    def wait(*_):
        Stream.waits += 1

    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_capability": capability,
        "get_device_name": name,
        "get_device_properties": properties,
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,
        "mem_get_info": (memory, memory),
        "get_rng_state": state,
        "set_rng_state": None,
        "set_device": None,
        "_lazy_init": None,
    }
    for owner in (torch.cuda, torch.cuda.random):
        for key, value in answers.items():
            if hasattr(owner, key):
                setattr(owner, key, lambda *_, _value=value, **__: _value)
    torch.cuda.current_stream = torch.cuda.default_stream = lambda *_: Stream()
    torch.cuda.Stream = torch.cuda.Event = torch.Event = Stream
    torch.cuda.stream, torch.cuda.synchronize = stream, wait
    torch.cuda.device = lambda *_: nullcontext()
    numbers = {"Device": 0, "DeviceCount": 1, "CurrentRawStream": 0}
    _answer_bindings({f"_cuda_get{key}": value for key, value in numbers.items()})
    changes = ("_cuda_setDevice", "_cuda_exchangeDevice", "_cuda_maybeExchangeDevice")
    _answer_bindings(dict.fromkeys((*changes, "_cuda_setStream"), 0))
    _answer_bindings({"_cuda_isCurrentStreamCapturing": False, "_cuda_isInBadFork": False})
    _answer_bindings({"_cuda_getCurrentStream": (0, 0, 1), "_get_cublas_allow_tf32": False})


def _answer_bindings(values):
    """Add the functions that a CPU build's C++ part does not have."""
    for name, value in values.items():
        if not hasattr(torch._C, name):
            setattr(torch._C, name, lambda *_, _value=value, **__: _value)
