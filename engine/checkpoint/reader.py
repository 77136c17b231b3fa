"""Reads a checkpoint into tensors that exist: compared first, then filled in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from ...model_zoo.layout import is_load
from ..core.errors import CheckpointError, nearest
from ..core.local import local
from ..core.text.display import MAX_SHOWN, list_problems
from ..core.text.selection import NameSelection
from ..optim.placement import OWNED
from .box import local_box
from .chunks import DTYPES, read_chunks
from .find import IntactCheckpoint, find_checkpoint
from .manifest import Manifest, TensorEntry
from .ranks import Ranks
from .state import model_state
from .tensors import ConcatenatedTensor, StoredChunk, add_mean_rows, dtype_name, fill_box


def load_state(
    path: Path,
    manifest: Manifest,
    state: Mapping[str, Tensor],
    group: ProcessGroup | None,
    remote: Collection[str] = (),
    *,
    may_cast: bool = False,
    may_grow: Collection[str] = (),
) -> None:
    """Fill `state` in place from a checkpoint that was saved by any number of ranks.

    The first word of a name is its section ("model", "optimizer", "rng"). Of each section that
    `state` has, every name of the checkpoint must be there, except in "rng", whose names belong to
    ranks. Other sections of the checkpoint are left alone. Without "optimizer", loads of experts
    may be on one side only.

    Args:
        path: folder of a checkpoint that was found intact.
        manifest: the manifest of that checkpoint.
        group: as for `CheckpointStore`.
        remote: names of weights and buffers that other ranks hold instead of this one.
        may_cast: whether floating-point numbers are read into another dtype; of a checkpoint that
            holds weights only, they always are.
        may_grow: names of tensors that may have more rows here; see `add_mean_rows`.

    Raises:
        CheckpointError: names, shapes or dtypes differ, all listed, and no tensor was touched; or
            the files cannot be read.
    """
    if not any(_section(name) == "optimizer" for name in state):  # no training resumes from this
        saved = manifest.tensors
        state = {name: each for name, each in state.items() if name in saved or not is_load(name)}
        left = (_parameter(name) for name in saved if is_load(name) and name not in state)
        remote = {*remote, *left}
    ranks = Ranks(group)
    # All ranks agree that the state fits before any tensor of any rank is changed.
    ranks.reduce(
        lambda: _check_fit(path, manifest, state, remote, may_cast, may_grow), lambda _: None
    )
    ranks.reduce(lambda: read_tensors(path, manifest, state), lambda _: None)


def load_weights(
    path: Path,
    model: nn.Module,
    group: ProcessGroup | None = None,
    *,
    may_lack: Sequence[Callable[[str], bool]] = (),
    left: tuple[str, ...] = (),
    selection: NameSelection | None = None,
    average: bool = False,
    may_grow: Collection[str] = (),
) -> Manifest:
    """Fill a model's weights; return the manifest.

    Args:
        path: a checkpoint, or a run directory, whose newest intact checkpoint is taken.
        group: as for `CheckpointStore`; None also works on several ranks, which then each
            check every byte.
        may_lack: each says by name which weights stay as they are where the checkpoint has none of
            them.
        left: what names of the checkpoint's weights begin with that are not read.
        selection: the weights that stay as they are, and those of other names.
        average: read averaged weights where the checkpoint has them.
        may_grow: names of weights that may have more rows here; see `add_mean_rows`.

    Raises:
        CheckpointError: there is none, it is damaged, it is of another model, or it has no average.
        RecipeError: a pattern of `selection` matches nothing.
    """
    found = find_checkpoint(path, group)
    state = model_state(model)
    selection = selection or NameSelection()
    names = _find_sources(found, selection, average=average)
    here = {*map(_parameter, state), *getattr(model, "remote_state", ())}
    selection.require_used(here, {_parameter(name) for name in names.values()})
    state = {name: each for name, each in state.items() if not selection.excludes(_parameter(name))}
    for test in may_lack:
        if not any(map(test, names)):
            state = {name: tensor for name, tensor in state.items() if not test(name)}
    state = {names.get(_parameter(name), name): tensor for name, tensor in state.items()}
    # What this rank leaves to others, or nobody reads.
    remote = {_parameter(names.get(name, name)) for name in getattr(model, "remote_state", ())}
    remote |= {_parameter(name) for name in names.values() if _parameter(name).startswith(left)}
    remote |= {_parameter(there) for name, there in names.items() if selection.excludes(name)}
    remote |= {_parameter(name) for name in state if _section(name) == "ema"}
    grown = [names[name] for name in may_grow if name in names]
    load_state(found.path, found.manifest, state, group, remote, may_cast=True, may_grow=grown)
    return found.manifest


def _find_sources(
    found: IntactCheckpoint, selection: NameSelection, *, average: bool
) -> dict[str, str]:
    """Return the tensor in a checkpoint that each weight is read from, by the weight's name here.

    Raises:
        CheckpointError: two tensors have the same name here, or no average is there.
    """
    saved = found.manifest.tensors
    sources: dict[str, str] = {}
    problems = []
    for name in saved:
        if _section(name) == "model":
            ours = selection.rename(_parameter(name))
            if ours in sources:
                problems.append(f"{sources[ours]} and {name} are both {ours} here")
            averaged = f"ema.{_parameter(name)}"
            sources[ours] = averaged if average and averaged in saved else name
    if problems:
        raise CheckpointError(list_problems(f"{found.path} does not fit:", problems))
    if average and not any(_section(name) == "ema" for name in saved):
        raise CheckpointError(
            f"{found.path} holds no averaged weights", "train with [ema] decay, such as 0.999"
        )
    return sources


def find_mismatches(
    state: Mapping[str, Tensor],
    manifest: Manifest,
    remote: Collection[str] = (),
    *,
    may_cast: bool = False,
    may_grow: Collection[str] = (),
) -> list[str]:
    """Return how names, shapes and dtypes of a state differ from a checkpoint's."""
    may_cast = may_cast or manifest.contents == "weights"
    problems: list[str] = []
    saved = manifest.tensors
    sections = {_section(name) for name in state}
    others = {name for name in saved if remote and _parameter(name) in remote}
    # Random states belong to ranks: another world size has more of them, or fewer. The state of a
    # matrix is on the rank that owns it.
    others |= {name for name in saved if OWNED in name}
    expected = {name for name in saved if _section(name) in sections - {"rng"}} - others
    missing = [name for name in state if name not in saved]
    for name in missing:
        hint = nearest(name, expected - set(state)) if len(problems) < MAX_SHOWN else ""
        problems.append(f"{name} is not in the checkpoint" + (f"; {hint}" if hint else ""))
    problems += [
        f"{name} is in the checkpoint but not here" for name in sorted(expected - set(state))
    ]
    for name, tensor in state.items():
        if name in saved:
            here = TensorEntry(shape=list(tensor.shape), dtype=dtype_name(tensor.dtype))
            both = (here["dtype"], saved[name]["dtype"])
            if may_cast and all("float" in dtype for dtype in both):
                here["dtype"] = both[1]  # cast while it is read
            if name in may_grow and _lacks_rows(saved[name], here):
                continue
            if here != saved[name]:
                problems.append(f"{name} is {_text(saved[name])} there and {_text(here)} here")
    return problems


def _check_fit(
    path: Path,
    manifest: Manifest,
    state: Mapping[str, Tensor],
    remote: Collection[str],
    may_cast: bool,
    may_grow: Collection[str],
) -> None:
    if manifest.contents == "weights" and any(_section(name) == "optimizer" for name in state):
        raise CheckpointError(
            f"{path} holds weights only: it has no optimizer state to resume from",
            "start another run from its weights with run.init_from",
        )
    problems = find_mismatches(state, manifest, remote, may_cast=may_cast, may_grow=may_grow)
    if problems:
        raise CheckpointError(list_problems(f"{path} does not fit:", problems))


def read_tensors(path: Path, manifest: Manifest, state: Mapping[str, Tensor]) -> None:
    """Fill tensors and DTensors in place, each rank its own shards, without communication.

    Raises:
        CheckpointError: the files are not what the manifest says, or cannot be read.
    """
    chunks: dict[str, Sequence[StoredChunk]] = {**read_chunks(path, manifest, state)}
    for name, tensor in state.items():
        entry = manifest.tensors[name]
        if tensor.ndim and tensor.shape[0] > entry["shape"][0]:  # `find_mismatches` allowed it
            shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
            stored = ConcatenatedTensor(dtype, shape, tuple(chunks[name]))
            chunks[name] = add_mean_rows(stored, tensor.shape[0]).parts
    try:
        for name, tensor in state.items():
            box = local_box(tensor)
            if box is not None:  # else all of it is on other ranks
                fill_box(local(tensor), box, chunks[name])
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error


def _lacks_rows(there: TensorEntry, here: TensorEntry) -> bool:
    """Return whether a stored tensor differs from one here by having fewer rows."""
    first, *others = there["shape"]
    return 0 < first < here["shape"][0] and {**there, "shape": [here["shape"][0], *others]} == here


def _section(name: str) -> str:
    return name.partition(".")[0]


def _parameter(name: str) -> str:
    """Return whose a tensor is: `a.b` for `model.a.b` and for `optimizer.a.b.step`."""
    section, _, rest = name.partition(".")
    return rest.rpartition(".")[0] if section == "optimizer" else rest


def _text(entry: TensorEntry) -> str:
    return f"{entry['dtype']} {entry['shape']}"
