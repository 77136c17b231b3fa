"""Llama 3's sizes (Grattafiori et al. 2024, arXiv:2407.21783, table 3). Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ..config import ModelConfig, Size, Sizes
from .layout import LAYOUT

if TYPE_CHECKING:
    from ...kernels.choose import Kernels
    from .model import Llama3

PositiveFloat = Annotated[float, Field(gt=0)]


class RopeScaling(Sizes):
    """Llama 3.1's stretching of the rotary frequencies for long contexts."""

    factor: PositiveFloat = 8.0
    """low frequencies are divided by this"""
    low_freq_factor: PositiveFloat = 1.0
    """wavelengths over original_max_seq_len / low_freq_factor are stretched in full"""
    high_freq_factor: PositiveFloat = 4.0
    """wavelengths under original_max_seq_len / high_freq_factor are left alone"""
    original_max_seq_len: Size = 8192
    """the context that the frequencies were made for"""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                f"high_freq_factor ({self.high_freq_factor}) must be above "
                f"low_freq_factor ({self.low_freq_factor})"
            )
        return self


class Llama3Config(ModelConfig):
    """Llama 3: pre-norm blocks of grouped-query attention with RoPE, and SwiGLU."""

    layout: ClassVar = LAYOUT
    flavors: ClassVar = {
        "debug": {},
        "1b": {
            "dim": 2048,
            "n_layers": 16,
            "n_heads": 32,
            "n_kv_heads": 8,
            "ffn_dim": 8192,
            "vocab_size": 128256,
            "rope_theta": 500000.0,
            "rope_scaling": {"factor": 32.0},
            "max_seq_len": 131072,
            "tie_embeddings": True,
        },
        "3b": {
            "dim": 3072,
            "n_layers": 28,
            "n_heads": 24,
            "n_kv_heads": 8,
            "ffn_dim": 8192,
            "vocab_size": 128256,
            "rope_theta": 500000.0,
            "rope_scaling": {"factor": 32.0},
            "max_seq_len": 131072,
            "tie_embeddings": True,
        },
        "8b": {
            "dim": 4096,
            "n_layers": 32,
            "n_heads": 32,
            "n_kv_heads": 8,
            "ffn_dim": 14336,
            "vocab_size": 128256,
            "rope_theta": 500000.0,
            "rope_scaling": {"factor": 8.0},
            "max_seq_len": 131072,
        },
        "70b": {
            "dim": 8192,
            "n_layers": 80,
            "n_heads": 64,
            "n_kv_heads": 8,
            "ffn_dim": 28672,
            "vocab_size": 128256,
            "rope_theta": 500000.0,
            "rope_scaling": {"factor": 8.0},
            "max_seq_len": 131072,
        },
        "405b": {
            "dim": 16384,
            "n_layers": 126,
            "n_heads": 128,
            "n_kv_heads": 8,
            "ffn_dim": 53248,
            "vocab_size": 128256,
            "rope_theta": 500000.0,
            "rope_scaling": {"factor": 8.0},
            "max_seq_len": 131072,
        },
    }

    name: Literal["llama3"] = "llama3"
    dim: Size = 64
    """width of the residual stream"""
    n_layers: Size = 4
    """number of blocks"""
    n_heads: Size = 4
    """query heads"""
    n_kv_heads: Size = 2
    """key-value heads; n_heads is a multiple of it"""
    head_dim: Size | None = None
    """width of a head; default dim / n_heads"""
    ffn_dim: Size = 192
    """width inside the feed-forward layer"""
    vocab_size: Size | None = None
    """rows of the embedding; default: the tokenizer's, rounded up to a multiple of 64"""
    max_seq_len: Size = 8192
    """longest sequence that it is meant for"""
    rope_theta: PositiveFloat = 10000.0
    """base of the rotary frequencies"""
    rope_scaling: RopeScaling | None = None
    """stretching of the rotary frequencies; none leaves them alone"""
    norm_eps: PositiveFloat = 1e-5
    """added to the mean square in each norm"""
    tie_embeddings: bool = False
    """one weight for the embedding and the output projection"""
    init_std: PositiveFloat = 0.02
    """standard deviation of the initial weights; those that write to the residual stream get
    init_std / sqrt(2 * n_layers)"""

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.head_dim or self.dim // self.n_heads

    @property
    def vocab(self) -> int:
        """Rows of the embedding, once settled."""
        assert self.vocab_size is not None, "with_vocab() settles the vocabulary first"
        return self.vocab_size

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_heads ({self.n_heads}) must be a multiple of n_kv_heads ({self.n_kv_heads})"
            )
        if self.head_dim is None and self.dim % self.n_heads:
            raise ValueError(
                f"dim ({self.dim}) must be a multiple of n_heads ({self.n_heads}), "
                "or head_dim given"
            )
        if self.head_width % 2:
            raise ValueError(f"the head width ({self.head_width}) must be even: RoPE turns pairs")
        return self

    def with_vocab(self, vocab_size: int) -> Self:
        """Return the config with its vocabulary size settled."""
        if self.vocab_size is not None:
            return self
        return self.model_copy(update={"vocab_size": -(-vocab_size // 64) * 64})

    def hf_config(self) -> dict[str, Any]:
        """Return what transformers' `LlamaConfig` says of this model, as version 5 writes it."""
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.rope_scaling is not None:
            rope |= {
                "rope_type": "llama3",
                "factor": self.rope_scaling.factor,
                "low_freq_factor": self.rope_scaling.low_freq_factor,
                "high_freq_factor": self.rope_scaling.high_freq_factor,
                "original_max_position_embeddings": self.rope_scaling.original_max_seq_len,
            }
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_size": self.dim,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "head_dim": self.head_width,
            "intermediate_size": self.ffn_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_seq_len,
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": rope,
            "tie_word_embeddings": self.tie_embeddings,
        }

    @property
    def embed_cost(self) -> float:
        """The memory traffic of looking up and updating a row over a block's products.

        A row is read in fp32 and written in bf16; its gradient is read, and added to one in fp32:
        16 bytes an element. In the time of a byte a GPU multiplies and adds about 150 times (H100:
        989e12 operations and 3.35e12 bytes a second); a weight does so three times a token.
        """
        return 16 * 150 / 3 / self._width_of_products

    @property
    def head_cost(self) -> float:
        """The projection's products over those of a block's weights."""
        return self.vocab / self._width_of_products

    @property
    def _width_of_products(self) -> int:
        """A block's weights that multiply, over `dim`."""
        return 2 * (self.n_heads + self.n_kv_heads) * self.head_width + 3 * self.ffn_dim

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every parameter, in the module's order."""
        dim, ends = self.dim, (self.vocab, self.dim)
        queries, keys = self.n_heads * self.head_width, self.n_kv_heads * self.head_width
        block = {
            "attention.norm": (dim,),
            "attention.q": (queries, dim),
            "attention.k": (keys, dim),
            "attention.v": (keys, dim),
            "attention.o": (dim, queries),
            "mlp.norm": (dim,),
            "mlp.gate": (self.ffn_dim, dim),
            "mlp.up": (self.ffn_dim, dim),
            "mlp.down": (dim, self.ffn_dim),
        }
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": ends}
        for number in range(self.n_layers):
            shapes |= {f"layers.{number}.{path}.weight": shape for path, shape in block.items()}
        shapes["head.norm.weight"] = (dim,)
        return shapes if self.tie_embeddings else {**shapes, "head.proj.weight": ends}

    def flops_per_token(self, seq_len: int) -> float:
        """Return floating-point operations a token of one training step."""
        attention = self.dim * self.head_width * (2 * self.n_heads + 2 * self.n_kv_heads)
        weights = self.n_layers * (attention + 3 * self.dim * self.ffn_dim) + self.dim * self.vocab
        return 6.0 * weights + 6.0 * self.n_layers * self.n_heads * self.head_width * seq_len

    def build(self, kernels: Kernels) -> Llama3:
        """Return the module."""
        from .model import Llama3

        return Llama3(self, kernels)
