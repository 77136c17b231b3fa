"""Triton's assembler is replaced where its machine code is known to be wrong, and only there."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trainer.engine.doctor import torch_checks
from trainer.engine.launch import assembler
from trainer.engine.launch.assembler import ASSEMBLER, choose_assembler, set_assembler
from trainer.engine.launch.environment import World
from trainer.engine.launch.group import pick_device


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Return a function that makes a Triton of some version with two assemblers."""

    def make(triton="3.7.1", usual="12.8", newer="13.1"):
        folder = tmp_path / "triton/backends/nvidia/bin"
        folder.mkdir(parents=True)
        for name, release in (("ptxas", usual), ("ptxas-blackwell", newer)):
            program = folder / name
            text = f"Cuda compilation tools, release {release}, V{release}.80"
            program.write_text(f"#!/bin/sh\necho '{text}'\n")
            program.chmod(0o755)
        (tmp_path / "triton/__init__.py").write_text("raise ImportError('must not be imported')")
        monkeypatch.setattr(assembler, "version", lambda name: triton)
        monkeypatch.setattr(assembler, "find_spec", lambda name: _spec(tmp_path / name))
        monkeypatch.delenv(ASSEMBLER, raising=False)
        return str(folder / "ptxas-blackwell")

    return make


def _spec(folder):
    return SimpleNamespace(submodule_search_locations=[str(folder)])


@pytest.mark.parametrize(
    ("installed", "capability", "cuda", "is_newer", "reason"),
    [
        ({}, (9, 0), "13.0", True, "ptxas 13.1 of Triton 3.7.1: 12.8 makes wrong code"),
        ({"triton": "3.8.0", "newer": "13.3"}, (9, 0), "13.0", True, "ptxas 13.3"),
        ({"triton": "3.6.0", "newer": "12.9"}, (9, 0), "12.8", True, "ptxas 12.9"),
        ({"triton": "3.9.0"}, (9, 0), "13.0", False, "Triton 3.9.0: no defect of it is known"),
        ({"triton": "3.10.0"}, (9, 0), "13.0", False, "no defect of it is known"),
        ({}, (8, 0), "13.0", False, "no defect of it is known"),
        ({}, (10, 0), "13.0", False, "no defect of it is known"),
        ({}, (9, 0), None, False, "no defect of it is known"),
        ({}, (9, 0), "12.8", False, "ptxas 13.1 needs a driver that torch for CUDA 12.8"),
        ({"newer": "12.8"}, (9, 0), "13.0", False, "has no newer one"),
    ],
)
def test_only_hopper_with_an_old_triton_gets_the_newer_one(
    install, installed, capability, cuda, is_newer, reason
):
    newer = install(**installed)
    choice = choose_assembler(capability, cuda, {})
    assert choice.path == (newer if is_newer else None)
    assert reason in choice.reason


def test_a_users_assembler_stays(install):
    install()
    environ = {ASSEMBLER: "my-ptxas"}
    set_assembler((9, 0), "13.0", environ)
    assert environ == {ASSEMBLER: "my-ptxas"}
    assert choose_assembler((9, 0), "13.0", environ).reason == f"my-ptxas: {ASSEMBLER} is set"


def test_a_file_that_does_not_run_is_not_chosen(install):
    Path(install()).chmod(0o644)
    assert choose_assembler((9, 0), "13.0", {}).path is None


def test_without_triton_there_is_none(monkeypatch):
    def missing(name):
        raise assembler.PackageNotFoundError(name)

    monkeypatch.setattr(assembler, "version", missing)
    assert choose_assembler((9, 0), "13.0", {}).reason == "none: Triton is not installed"


def test_the_installed_triton_has_the_newer_one():
    pytest.importorskip("triton")
    path = choose_assembler((9, 0), "13.0", {}).path
    if assembler._numbers(assembler.version("triton")) < (3, 9):
        assert path
        assert assembler._release(Path(path)) > (12, 8)


def test_a_rank_sets_it_after_its_device(install, monkeypatch):
    newer, calls = install(), []
    environ: dict[str, str] = {}

    def capability(_):
        assert calls == [1], "the capability of a GPU opens a context: first the device"
        return (9, 0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", calls.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(assembler.os, "environ", environ)
    is_imported = "triton" in sys.modules
    world = World(rank=1, world_size=2, local_rank=1, local_world_size=2, launcher="trainer")
    assert pick_device(world) == torch.device("cuda", 1)
    assert environ == {ASSEMBLER: newer}
    assert ("triton" in sys.modules) == is_imported


def test_the_doctor_says_which_and_why(install, monkeypatch):
    install()
    properties = SimpleNamespace(total_memory=2**36)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    found = {each.subject: each.text for each in torch_checks.check_devices()}
    assert "ptxas 13.1 of Triton 3.7.1" in found["cuda:0 assembler"]
