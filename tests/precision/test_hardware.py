from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainer.engine.core.errors import EnvironmentFault
from trainer.engine.doctor.examine import examine
from trainer.engine.precision.hardware import (
    bf16_instructions,
    multiplies_bf16,
    multiplies_low_precision,
    require_formats,
)
from trainer.engine.precision.tables import MX, Float8, Precision
from trainer.model_zoo.llama3.config import Llama3Config
from trainer.model_zoo.qwen3.config import Qwen3Config


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


GPU = torch.device("cuda", 0)
LLAMA, QWEN = Llama3Config(), Qwen3Config.model_validate({"flavor": "moe_debug"})


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], None]:
    """Let torch name a GPU of some compute capability."""

    def pretend(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A GPU")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.version, "hip", None)

    return pretend


@pytest.mark.parametrize(
    ("capability", "float8", "mx"),
    [
        ((8, 0), False, False),
        ((8, 9), True, False),
        ((9, 0), True, False),
        ((10, 0), True, True),
        ((12, 0), True, True),
    ],
)
def test_formats_by_compute_capability(
    gpu: Callable[[tuple[int, int]], None], capability: tuple[int, int], float8: bool, mx: bool
) -> None:
    gpu(capability)
    assert multiplies_low_precision("float8", GPU)[0] == float8
    assert multiplies_low_precision("mx", GPU)[0] == mx


def test_a_format_that_the_device_lacks_is_refused_unless_emulated(
    gpu: Callable[[tuple[int, int]], None],
) -> None:
    gpu((9, 0))
    require_formats(Precision(float8=Float8(enabled=True)), LLAMA, GPU)
    for emulate in (True, False):
        table = Precision(mx=MX(enabled=True, emulate=emulate))
        if emulate:
            require_formats(table, LLAMA, GPU)
            continue
        with pytest.raises(EnvironmentFault, match=r"under 10\.0") as caught:
            require_formats(table, LLAMA, GPU)
        assert "precision.mx.emulate = true" in caught.value.hint
    with pytest.raises(EnvironmentFault, match=r"precision\.float8 cannot run .* this CPU"):
        require_formats(Precision(float8=Float8(enabled=True)), LLAMA, torch.device("cpu"))


def test_experts_need_a_gpu_that_can_even_where_projections_are_emulated(
    gpu: Callable[[tuple[int, int]], None],
) -> None:
    gpu((8, 0))
    table = Precision(float8=Float8(enabled=True, emulate=True))
    require_formats(table, LLAMA, GPU)
    require_formats(table, QWEN, torch.device("cpu"))
    with pytest.raises(EnvironmentFault, match=r"experts in float8 .* capability 8\.0") as caught:
        require_formats(table, QWEN, GPU)
    assert caught.value.hint == 'set precision.float8.exclude = ["*.experts.*"]'


@pytest.mark.skipif(torch.cuda.is_available(), reason="of machines without a GPU")
def test_the_doctor_says_what_a_device_can(tmp_path: Path) -> None:
    found = {each.subject: each.text for each in examine(tmp_path)}
    for word in ("float8", "mx"):
        assert found[f"cpu {word}"].startswith("emulated only: ")
