"""What a GPU holds besides tensors. Torch-free.

None of these figures was measured on the hardware that they are used for: they are what others
published, so treat a plan that only just fits as one that may not.
"""

from __future__ import annotations

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
"""memory as nvidia-smi shows it"""

BEFORE_HOPPER = ("a100-40", "a100", "l40s", "rtx4090")

CONTEXT = 1343 * MIB
"""The CUDA context with torch's kernels loaded (Hugging Face transformers, "Model training
anatomy": 1,343 MB after the first tensor); kernels that are loaded when needed take less."""

COMMUNICATOR = 32 * 10 * MIB
"""A communicator's buffers: up to 32 channels between GPUs of one machine, of 10,485,760 bytes each
(https://github.com/NVIDIA/nccl/issues/1685, 8 x H100)."""

HOPPER_WORKSPACE, WORKSPACE = 32 * MIB, 8_519_680
"""What cuBLAS and cuBLASLt get each: 32 MiB from Hopper on (pytorch/pytorch #120925), else
8,519,680 bytes (torch's default, ":4096:2:16:8")."""

FRAGMENTATION = 0.17
"""Share of the tensors' bytes that the allocator reserves besides: the one that brings the
estimates of three plans to within 6 % of the peaks of reserved memory that torchtitan published
(`benchmarks/estimate.py`: they reserve 13, 19 and 24 % more). With torch's default settings Guo et
al. (2024, arXiv:2401.08156) lost 15 % on average; expandable segments lose less."""


def margins(
    peak_bytes: int, communicators: int, gathered_ahead: int, gpu: str = "h100"
) -> dict[str, int]:
    """Return the bytes of each thing that no simulation sees, by name.

    Args:
        peak_bytes: most that tensors hold.
        communicators: that a rank is in.
        gathered_ahead: bytes of a block's weights, and of its gradients on their way to shards,
            that copies of the next block's overlap with.
        gpu: a name of `GPU_MIB`.
    """
    workspace = WORKSPACE if gpu in BEFORE_HOPPER else HOPPER_WORKSPACE
    found = {
        "CUDA context": CONTEXT,
        "NCCL": COMMUNICATOR * communicators,
        # Of two libraries, for the thread that runs forward and the one that runs backward.
        "cuBLAS": 4 * workspace,
        "prefetch": gathered_ahead,
        "fragmentation": int(FRAGMENTATION * peak_bytes),
    }
    return {name: size for name, size in found.items() if size}
