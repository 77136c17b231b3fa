from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from trainer.engine.precision.hardware import bf16_instructions, multiplies_bf16


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor : 0\nflags\t\t: fpu avx512f avx512_bf16 avx512_vnni\n", "avx512_bf16"),
        ("flags\t\t: fpu avx512_bf16 amx_bf16 amx_tile\n", "amx_bf16"),
        ("flags\t\t: fpu avx512f avx512_vnni amx_tile\n", ""),
        ("Features\t: fp asimd sve i8mm bf16\n", "bf16"),
        ("model name\t: a CPU with avx512_bf16\n", ""),
        ("", ""),
    ],
)
def test_the_flags_of_a_cpu(text: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(text)
    assert bf16_instructions(path) == expected
    assert bf16_instructions(tmp_path / "missing") == ""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="torch asks x86 CPUs only")
def test_torch_sees_the_same_instructions_on_this_cpu() -> None:
    native, reason = multiplies_bf16(torch.device("cpu"))
    assert native == (torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    assert "CPU" in reason


def test_nothing_is_claimed_of_unknown_devices() -> None:
    assert multiplies_bf16(torch.device("meta")) == (
        False,
        "nothing is known about meta devices",
    )
