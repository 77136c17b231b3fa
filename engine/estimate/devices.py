"""Lists GPUs: peak rates, memory, and the memory that is used outside of tensors. Torch-free.

The overheads are published figures and were not measured on each of these GPUs. A plan that only
just fits may therefore run out of memory.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """The peak rates of one GPU in a common server.

    Attributes:
        flops: dense bf16 FLOPs per second with fp32 accumulation.
        memory_bandwidth: bytes per second from and to the GPU's memory.
        node_bandwidth: bytes per second to the GPUs of the same node, in one direction.
        network_bandwidth: bytes per second to other nodes, in one direction: the GPU's share of the
            node's network cards.
    """

    flops: float
    memory_bandwidth: float
    node_bandwidth: float
    network_bandwidth: float


DEVICES = {
    # NVIDIA A100 data sheet (June 2021): 312 TFLOP/s, 1555 and 2039 GB/s, NVLink 600 GB/s both
    # ways. DGX A100 data sheet: 8 cards of 200 Gb/s.
    "a100-40": Device(312e12, 1.555e12, 300e9, 25e9),
    "a100": Device(312e12, 2.039e12, 300e9, 25e9),
    # NVIDIA H100 data sheet, SXM: 1979 TFLOP/s with sparsity, half of it dense, 3.35 TB/s,
    # NVLink 900 GB/s both ways. DGX H100 data sheet: 8 cards of 400 Gb/s.
    "h100": Device(989e12, 3.35e12, 450e9, 50e9),
    # NVIDIA H200 data sheet, SXM: as H100, 4.8 TB/s. DGX H200 data sheet: 8 cards of 400 Gb/s.
    "h200": Device(989e12, 4.8e12, 450e9, 50e9),
    # NVIDIA DGX B200 data sheet, of 8: 36 PFLOP/s with sparsity, 64 TB/s, NVLink 14.4 TB/s both
    # ways, 8 cards of 400 Gb/s.
    "b200": Device(2250e12, 8e12, 900e9, 50e9),
    # NVIDIA L40S data sheet: 362 TFLOP/s, 864 GB/s, PCIe 4.0 x16, 64 GB/s both ways. Its machines
    # differ; taken here: a card of 100 Gb/s for each GPU.
    "l40s": Device(362e12, 0.864e12, 32e9, 12.5e9),
    # NVIDIA Ada GPU architecture white paper, appendix A: 165.2 TFLOP/s, 1008 GB/s, PCIe 4.0 x16.
    # Network: as above.
    "rtx4090": Device(165.2e12, 1.008e12, 32e9, 12.5e9),
}


@dataclass(frozen=True)
class Clock:
    """How near well-tuned engines come to a GPU's data sheet.

    Attributes:
        product_share: share of the peak FLOPs that a large matrix product reaches.
        half_size: rows, or columns, of a product that reaches half of that.
        attention_share: share of the peak FLOPs that fused attention reaches.
        eager_traffic: times that an activation which a block saves is read or written.
        compiled_traffic: the same in a compiled block, whose operations are fused.
        eager_launch: seconds that a pass of a micro batch through a block costs beside the work.
        compiled_launch: the same of a compiled block.
        node_share: share of the links' bandwidth that collectives reach inside a node.
        network_share: the same between nodes.
        node_latency: seconds of a collective inside a node, times log2 of its ranks.
        network_latency: the same between nodes.
        exposed: share of communication beside computation that is not hidden.
        async_exposed: share of tensor parallel communication that is left with `async_tensor`.
    """

    product_share: float
    half_size: float
    attention_share: float
    eager_traffic: float
    compiled_traffic: float
    eager_launch: float
    compiled_launch: float
    node_share: float
    network_share: float
    node_latency: float
    network_latency: float
    exposed: float
    async_exposed: float


CLOCK = Clock(
    product_share=0.577,
    half_size=162.0,
    attention_share=0.333,
    eager_traffic=6.92,
    compiled_traffic=4.59,
    eager_launch=7.79e-3,
    compiled_launch=2.94e-4,
    node_share=0.693,
    network_share=0.538,
    node_latency=5.05e-6,
    network_latency=1.98e-5,
    exposed=0.127,
    async_exposed=0.5,
)
"""Fitted on 2026-11-23 by `benchmarks/clock.py --fit` to 28 of the 60 figures of
`benchmarks/published.csv`, which names their sources; the other 32 test it. The latencies and
`async_exposed` stayed near where the fit began: the figures say little about them."""


MIB = 2**20

GPU_MIB = {
    "a100-40": 40_960,
    "a100": 81_920,
    "h100": 81_559,
    "h200": 143_771,
    "b200": 183_359,
    "l40s": 46_068,
    "rtx4090": 24_564,
}
"""memory in MiB as nvidia-smi shows it"""

# cuBLAS uses a smaller default workspace on these.
BEFORE_HOPPER = ("a100-40", "a100", "l40s", "rtx4090")

CONTEXT = 1343 * MIB
"""The CUDA context with torch's kernels loaded (Hugging Face transformers, "Model training
anatomy": 1,343 MB after the first tensor); kernels that are loaded when needed take less."""

COMMUNICATOR = 32 * 10 * MIB
"""A communicator's buffers: up to 32 channels between GPUs of one machine, of 10,485,760 bytes each
(https://github.com/NVIDIA/nccl/issues/1685, 8 x H100)."""

HOPPER_WORKSPACE, WORKSPACE = 32 * MIB, 8_519_680
"""Workspace of cuBLAS and of cuBLASLt: 32 MiB from Hopper on (pytorch/pytorch #120925), else
8,519,680 bytes (torch's default, ":4096:2:16:8")."""

FRAGMENTATION = 0.17
"""Share of the tensors' bytes that the allocator reserves besides: the one that brings the
estimates of three plans to within 6 % of the peaks of reserved memory that torchtitan published
(`benchmarks/memory.py`: they reserve 13, 19 and 24 % more). With torch's default settings Guo et
al. (2024, arXiv:2401.08156) lost 15 % on average; expandable segments lose less."""


def overhead(
    peak_bytes: int, communicators: int, prefetched: int, gpu: str = "h100"
) -> dict[str, int]:
    """Return the bytes that a GPU uses outside of simulated tensors, by name.

    Args:
        peak_bytes: the largest sum of live tensors.
        communicators: the number of NCCL communicators of a rank.
        prefetched: the bytes of one block's all-gathered weights and unreduced gradients, which
            FSDP holds for the next block at the same time.
        gpu: a key of `GPU_MIB`.
    """
    workspace = WORKSPACE if gpu in BEFORE_HOPPER else HOPPER_WORKSPACE
    sizes = {
        "CUDA context": CONTEXT,
        "NCCL": COMMUNICATOR * communicators,
        # cuBLAS and cuBLASLt, each for the forward thread and for autograd's backward thread.
        "cuBLAS": 4 * workspace,
        "prefetch": prefetched,
        "fragmentation": int(FRAGMENTATION * peak_bytes),
    }
    return {name: size for name, size in sizes.items() if size}
