"""Asks llama.cpp, by the package xllamacpp, what a GGUF file says of the next token."""

from pathlib import Path
from typing import Any

import torch
import xllamacpp
from torch import Tensor

CONTEXT = 512


class LlamaCpp:
    """A server of llama.cpp inside this process.

    Args:
        file: the GGUF file.
        vocab_size: how many tokens the file's vocabulary has.
    """

    def __init__(self, file: Path, vocab_size: int) -> None:
        parameters = xllamacpp.CommonParams()
        parameters.model.path = str(file)
        parameters.n_ctx = CONTEXT
        parameters.n_parallel = 1
        parameters.warmup = False
        parameters.n_gpu_layers = 0
        parameters.cpuparams.n_threads = 1
        # Keys and values in float32, and no flash attention, which would round them.
        parameters.cache_type_k = parameters.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.vocab_size = vocab_size
        self._server = xllamacpp.Server(parameters)

    def log_probabilities(self, prompt: str | list[int]) -> Tensor:
        """Return the logarithms of the probabilities of each next token [V] after a prompt."""
        said = self._complete(prompt, 1, n_probs=self.vocab_size)
        found = torch.full((self.vocab_size,), float("nan"))
        for each in said["logprobs"]["content"][0]["top_logprobs"]:
            found[each["id"]] = each["logprob"]
        return found

    def generate(self, prompt: str, count: int) -> str:
        """Return the likeliest text after a prompt, of so many tokens."""
        return str(self._complete(prompt, count)["text"])

    def _complete(self, prompt: str | list[int], count: int, **settings: Any) -> dict[str, Any]:
        request = {"prompt": prompt, "n_predict": count, "temperature": 0.0, "cache_prompt": False}
        said = self._server.handle_completions(request | settings)
        assert isinstance(said, dict), said
        return dict(said["choices"][0])
