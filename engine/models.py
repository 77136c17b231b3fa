"""The registry of model families."""

from ..model_zoo.config import ModelConfig
from ..model_zoo.llama3.config import Llama3Config
from .registry import Registry

models: Registry[ModelConfig] = Registry("model", default="llama3")
models.register(Llama3Config)
