"""The registry of model families."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...model_zoo.config import ModelConfig
from ...model_zoo.deepseek_v3.config import DeepSeekV3Config
from ...model_zoo.gpt_oss.config import GptOssConfig
from ...model_zoo.llama3.config import Llama3Config
from ...model_zoo.llama4.config import Llama4Config
from ...model_zoo.mixtral.config import MixtralConfig
from ...model_zoo.qwen3.config import Qwen3Config
from .errors import CheckpointError
from .registry import Registry

models: Registry[ModelConfig] = Registry("model", default="llama3")
models.register(Llama3Config)
models.register(DeepSeekV3Config)
models.register(GptOssConfig)
models.register(Llama4Config)
models.register(MixtralConfig)
models.register(Qwen3Config)


def family_of(settings: Mapping[str, Any], place: Path) -> type[ModelConfig]:
    """Return the model family of a config.json.

    Args:
        place: the folder that it is in.

    Raises:
        CheckpointError: there is none.
    """
    kind = settings.get("model_type")
    families = {name: models[name].layout.hf_possible.get("model_type", ()) for name in models}
    for name, kinds in families.items():
        if isinstance(kind, str) and kind in kinds:
            return models[name]
    known = ", ".join(sorted(str(kind) for kinds in families.values() for kind in kinds))
    raise CheckpointError(
        f"{place / 'config.json'}: no model of ours is of the type {str(kind)[:80]!r}",
        f"known: {known}",
    )
