"""torch.compile as a recipe asks for it, with a cache that only this user can write.

Imported only by runs that compile: the compiler takes longer to import than the rest of torch.
"""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xxhash

from ...kernels import torch_private
from ...kernels.torch_private import dynamo
from ...kernels.torch_private import functorch_config as autograd_config
from ..checkpoint.find import is_checkpoint
from ..core.errors import EnvironmentFault, Problem, RecipeError, nearest
from ..core.files import make_private, user_cache
from ..core.run_dir import RunDirectory
from .axis import ALONE, Sharing
from .tables import INDUCTOR, Compile, Memory

CACHE = "TORCHINDUCTOR_CACHE_DIR"
"""the environment variable in which torch looks for the folder of its cache"""
OPAQUE_SIZES = "unsafe_treat_script_objects_as_zero_size"
"""torch's setting (2.13) by which objects in a graph that are no tensors count as no memory"""


def make_compiler(
    compile_: Compile, memory: Memory, sharing: Sharing = ALONE
) -> Callable[..., Any]:
    """Return a function that compiles the forward pass of a block as the recipe says.

    Args:
        compile_: the recipe's `[compile]`.
        memory: the recipe's `[memory]`, whose budget the compiler keeps to.
        sharing: how ranks share blocks.

    Raises:
        RecipeError: torch.compile has no such backend or option.
        EnvironmentFault: others could write in the folder of the cache, or this torch keeps to no
            budget for split weights.
    """
    settings: dict[str, Any] = {"fullgraph": compile_.fullgraph, "dynamic": compile_.dynamic}
    if compile_.backend != INDUCTOR:
        _require_backend(compile_.backend)
    else:
        open_cache(compile_.cache_dir)
        _require_options(compile_.options)
    patches = dict(compile_.options)
    if compile_.mode != "default":
        patches = torch_private.inductor.list_mode_options(compile_.mode)
    if sharing.shares_experts and compile_.backend == INDUCTOR:
        # The rows of experts differ from step to step, and each number would record a CUDA graph.
        patches.setdefault("triton.cudagraph_skip_dynamic_graphs", True)
    if sharing.splits_backward:
        # The pass for weights reads what the pass for inputs has read. Torch looks at this global
        # setting when it compiles and again in each backward pass, where it would refuse.
        autograd_config.donated_buffer = False
    if memory.recompute == "budget":
        if sharing.splits_weights and not hasattr(autograd_config, OPAQUE_SIZES):
            raise EnvironmentFault(
                'memory.recompute = "budget" with parallel.tensor needs torch 2.13 or later, and '
                f"this is {torch.__version__}",
                'install it, take "selective", or keep parallel.tensor = 1',
            )
        settings["backend"] = _compile_within(memory.recompute_budget, compile_.backend, patches)
    else:
        settings |= {"backend": compile_.backend, "options": patches or None}
    return partial(torch.compile, **settings)


def open_cache(folder: str) -> None:
    """Let torch's compiler keep what it compiles in a private folder, for later starts.

    Args:
        folder: `compile.cache_dir`; empty: the folder that the environment names, or one in the
            user's cache. Torch's own default is a folder in /tmp that another user may have made.

    Raises:
        EnvironmentFault: others could write in the folder, or it lies in a run's folder.
    """
    key = "compile.cache_dir"
    path = user_cache(folder or os.environ.get(CACHE, ""), "compile", key).absolute()
    for above in (path, *path.resolve().parents):
        run = RunDirectory(above)
        if is_checkpoint(above) or (run.recipe.is_file() and run.checkpoints.is_dir()):
            raise EnvironmentFault(
                f"{path} is in the folder of a run or checkpoint, which may come from elsewhere",
                f"give {key} another folder: code is read from it and runs",
            )
    make_private(path, key)
    instructions = _name_instructions()
    if path.name != instructions:  # else the process that started this one has chosen it
        path /= instructions
        make_private(path, key)
    # Torch reads the variable whenever it looks for a compiled graph.
    os.environ[CACHE] = str(path)
    # Without this, torch caches no graph with an autograd.Function, as SwiGLU is. Both graphs of
    # the function are part of the key (torch 2.11 to 2.13).
    if hasattr(autograd_config, "autograd_cache_allow_custom_autograd_functions"):
        autograd_config.autograd_cache_allow_custom_autograd_functions = True
    _ = torch_private.compile_fx  # the import alone
    codecache = torch_private.inductor_codecache
    if hasattr(codecache, "_HEADER_DIR"):
        # Torch leaves these in /tmp, whatever its variable says (2.11 to 2.13).
        codecache._HEADER_DIR = str(path / "precompiled_headers")
        codecache._HEADER_LOCK_DIR = str(path / "precompiled_headers" / "locks")
    if not torch.cuda.is_available():
        _skip_probes(path)


def _name_instructions() -> str:
    """Return a name for the vector instructions for which inductor generates code.

    Torch's cache key leaves them out (2.11 to 2.13): a process that may only use AVX2, and finds a
    graph for AVX-512 in a cache that machines share, ends by SIGSEGV.
    """
    present = torch_private.cpu_vec_isa.x86_isa_checker()
    return "-".join([platform.machine(), *present, os.environ.get("ATEN_CPU_CAPABILITY", "all")])


def _skip_probes(folder: Path) -> None:
    """Let inductor take the CPU's vector units for usable if it found them so in an earlier start.

    Otherwise each start compiles nothing new, but loads a test library for each unit in a Python
    process of its own. What it finds depends on the CPU, the C++ compiler and torch alone.
    """
    settings = torch_private.inductor_config.cpp
    if settings.vec_isa_ok is not None:
        return
    units = torch_private.cpu_vec_isa
    compiler = Path(shutil.which(os.environ.get("CXX", "g++")) or "")
    present = units.x86_isa_checker()
    inputs = [torch.__version__, present, str(compiler), compiler.stat().st_mtime_ns]
    mark = folder / f"vector-units-{xxhash.xxh3_64_hexdigest(repr(inputs).encode())}"
    if not mark.exists():
        expected = [
            each for each in units.supported_vec_isa_list if {*str(each).split()} <= {*present}
        ]
        if units.valid_vec_isa_list() != expected:
            return
        mark.touch()
    settings.vec_isa_ok = True


def _require_backend(name: str) -> None:
    # By default torch leaves out the backends for debugging, such as "eager"; it does take them.
    known = dynamo.list_backends(exclude_tags=None)
    if name not in known:
        hint = nearest(name, known) or f"known: {', '.join(known)}"
        raise RecipeError([Problem(f"torch.compile has no {name!r}", "compile.backend", hint=hint)])


def _require_options(options: dict[str, Any]) -> None:
    """Check names and types of options.

    Raises:
        RecipeError: inductor has no such option, or takes another type for it.
    """
    known: dict[str, Any] = torch_private.inductor_config.get_config_copy()
    problems = []
    for name, value in options.items():
        key = f"compile.options.{name}"
        default = known.get(name.replace("-", "_"))
        if name.replace("-", "_") not in known:
            problems.append(Problem("inductor has no such option", key, hint=nearest(name, known)))
        elif default is not None and not isinstance(value, type(default)):
            words = f"is a {type(value).__name__}, and inductor expects a {type(default).__name__}"
            problems.append(Problem(words, key))
    if problems:
        raise RecipeError(problems)


def _compile_within(budget: float, backend: str, patches: dict[str, Any]) -> Callable[..., Any]:
    """Return a backend of torch.compile with this run's budget, which no other run sees."""
    compile_graph = dynamo.lookup_backend(backend)
    options = {"config_patches": patches} if patches else {}
    settings: dict[str, Any] = {"activation_memory_budget": budget}
    if hasattr(autograd_config, OPAQUE_SIZES):
        # The partitioner weighs every value of the graph, and the only such objects in a block are
        # the device meshes of weights that ranks split: they hold no tensor of the graph.
        settings[OPAQUE_SIZES] = True

    # These are global settings of torch, which its partitioner reads while it compiles: they are
    # changed for just that time.
    def compile_within_budget(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        with autograd_config.patch(settings):
            return compile_graph(graph, inputs, **options)

    return compile_within_budget
