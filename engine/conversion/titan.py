"""Opens a checkpoint of torchtitan for conversion."""

from __future__ import annotations

from pathlib import Path

from ..core.errors import CheckpointError
from ..formats.titan_folder import EMBED, match_titan, open_model_tensors
from ..recipe.schema import Recipe
from .source_weights import SourceWeights, parameter_shapes
from .sources import rows_of


def open_titan(folder: Path, recipe: Recipe | None) -> SourceWeights:
    """Open the folder of one step of torchtitan's checkpoints.

    Args:
        folder: a folder of torch.distributed.checkpoint.
        recipe: the recipe that describes the model: the folder does not.

    Raises:
        CheckpointError: the folder cannot be read or does not fit the model, or there is no recipe.
    """
    stored = open_model_tensors(folder)
    if recipe is None:
        message = f"{folder} does not say how large its model is"
        raise CheckpointError(message, "describe the model with --recipe")
    found = {name: tensor.shape for name, tensor in stored.items()}
    config = recipe.model.with_vocab(rows_of(found, EMBED))
    # A bias that balances is a buffer, which is looked for by our name.
    biases = {
        name.replace("moe.expert_bias", "mlp.router.bias"): shape for name, shape in found.items()
    }
    shapes = parameter_shapes(config, biases, folder)
    tensors = match_titan(folder, stored, shapes, config)
    return SourceWeights(folder, config, tensors, recipe)
