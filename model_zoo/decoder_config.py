"""Sizes that decoders share: blocks of attention and feed-forward layer between two ends.

Torch-free.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import model_validator

from .config import ModelConfig
from .heads import HF_CLASSES, TaskHead
from .layers.configs import MoESettings, NormPlacement
from .layers.rope_scaling import LinearScaling, LongRopeScaling, RopeScaling, YarnScaling
from .sizes import PositiveFloat, Size

if TYPE_CHECKING:
    pass


class DecoderConfig(ModelConfig):
    """Fields and counts of every decoder; a family adds its attention and feed-forward layers.

    Attributes:
        norms: where the halves of a block have norms.
        hf_class: what the names of transformers' classes of this model begin with.
        hf_heads: the kinds of `HeadSettings` that transformers has for this model.
        has_zero_centered_norms: whether norms multiply by 1 + weight, and weights start at 0.
        has_geglu: whether feed-forward layers are gated by GELU instead of SiLU.
        only_causal: why attention of this family cannot be bidirectional; empty: it can.
    """

    takes_heads: ClassVar = True
    norms: ClassVar[NormPlacement] = "before"
    hf_class: ClassVar[str] = ""
    hf_heads: ClassVar[tuple[TaskHead, ...]] = tuple(HF_CLASSES)
    has_zero_centered_norms: ClassVar[bool] = False
    has_geglu: ClassVar[bool] = False
    only_causal: ClassVar[str] = ""

    takes_lengths: ClassVar[bool] = True

    dim: Size = 64
    """width of the residual stream"""
    n_layers: Size = 4
    """number of blocks"""
    n_heads: Size = 4
    """query heads"""
    vocab_size: Size | None = None
    """rows of the embedding; default: the tokenizer's, rounded up to a multiple of 64"""
    max_seq_len: Size = 8192
    """longest sequence that it is meant for"""
    rope_theta: PositiveFloat = 10000.0
    """base of the rotary frequencies"""
    norm_eps: PositiveFloat = 1e-5
    """added to the mean square in each norm"""
    attention: Literal["causal", "bidirectional"] = "causal"
    """"causal": a position sees those before it; "bidirectional": all of its text, later ones too,
    for tasks that generate nothing"""
    tie_embeddings: bool = False
    """one weight for the embedding and the output projection"""
    init_std: PositiveFloat = 0.02
    """standard deviation of the initial weights; those that write to the residual stream get
    init_std / sqrt(2 * n_layers)"""

    @model_validator(mode="after")
    def _check_attention(self) -> Self:
        if self.only_causal and self.is_bidirectional:
            raise ValueError(
                f'attention = "bidirectional" is not for {self.name}: {self.only_causal}'
            )
        return self

    @property
    def is_bidirectional(self) -> bool:
        """Whether positions see later ones."""
        return self.attention == "bidirectional"

    @property
    def vocab(self) -> int:
        """Rows of the embedding, once settled."""
        assert self.vocab_size is not None, "with_vocab() settles the vocabulary first"
        return self.vocab_size

    def with_vocab(self, vocab_size: int) -> Self:
        """Return the config with its vocabulary size settled."""
        if self.vocab_size is not None:
            return self
        return self.model_copy(update={"vocab_size": -(-vocab_size // 64) * 64})

    if TYPE_CHECKING:
        ffn_dim: Size  # a key of families that have blocks without experts

    @property
    def embed_scale(self) -> float:
        """What the embedding's output is multiplied by."""
        return 1.0

    @property
    def head_softcap(self) -> float | None:
        """The softcap of token logits, see `kernels.softcap`; None: logits are not capped."""
        return None

    @property
    def num_blocks(self) -> int:
        """The number of blocks, those of further predictions included."""
        return self.n_layers + self.predictions

    @property
    def trained_blocks(self) -> int:
        """The number of blocks that a training step computes, which come first."""
        return self.n_layers + self.trained_predictions

    @property
    def frozen_prefixes(self) -> tuple[str, ...]:
        """What the names of parameters of blocks that no training step computes begin with."""
        numbers = range(self.trained_blocks, self.num_blocks)
        return tuple(f"{self.layout.blocks}.{number}." for number in numbers)

    @property
    def rotary_width(self) -> int:
        """How many numbers of each head the rotary embedding rotates."""
        raise NotImplementedError

    @property
    def frequency_scaling(
        self,
    ) -> RopeScaling | YarnScaling | LongRopeScaling | LinearScaling | None:
        """How rotary frequencies are scaled; None in families without the key `rope_scaling`."""
        return getattr(self, "rope_scaling", None)

    def experts_of(self, number: int) -> MoESettings | None:
        """Return the experts of block `number`; None for a block with one feed-forward layer."""
        return getattr(self, "moe", None)

    def attention_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name (inside of a block) and shape of the parameters of a block's attention."""
        raise NotImplementedError

    def norm_shapes(self, half: str) -> dict[str, tuple[int, ...]]:
        """Return name and shape of the norms before and after a half of a block."""
        names = {"before": ("norm",), "after": ("post_norm",), "both": ("norm", "post_norm")}
        return {f"{half}.{name}.weight": (self.dim,) for name in names[self.norms]}

    def block_shapes(self, number: int) -> dict[str, tuple[int, ...]]:
        """Return name (inside of the block) and shape of block `number`'s parameters, in order."""
        if experts := self.experts_of(number):
            return {**self.attention_shapes(), **experts.shapes(self.dim)}
        return {
            **self.attention_shapes(),
            **self.norm_shapes("mlp"),
            "mlp.gate.weight": (self.ffn_dim, self.dim),
            "mlp.up.weight": (self.ffn_dim, self.dim),
            "mlp.down.weight": (self.dim, self.ffn_dim),
        }

    def describe_block(self, number: int) -> tuple[object, ...]:
        """Return what tells block `number` from blocks of another kind."""
        window, rotary = getattr(self, "window_of", None), getattr(self, "has_rotary", None)
        return (
            *self.block_shapes(number),
            bool(window and window(number)),
            bool(rotary and not rotary(number)),
        )

    def matmul_parameters(self, number: int) -> float:
        """Return how many weights of block `number` multiply each token, of experts those taken."""
        experts = self.experts_of(number)
        matrices = [
            math.prod(shape)
            for name, shape in self.block_shapes(number).items()
            if len(shape) == 2 and not (experts and name.startswith("mlp."))
        ]
        return float(sum(matrices) + (experts.active_parameters(self.dim) if experts else 0))

    def attention_multiplications(self, number: int, seq_len: int) -> float:
        """Return the multiplications a token of block `number`'s scores and weighted values.

        Causal attention is counted at half.
        """
        raise NotImplementedError

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of every parameter, in the module's order."""
        ends = (self.vocab, self.dim)
        shapes: dict[str, tuple[int, ...]] = {"embed.weight": ends}
        for number in range(self.num_blocks):
            block = self.block_shapes(number)
            shapes |= {f"layers.{number}.{name}": shape for name, shape in block.items()}
        shapes["head.norm.weight"] = (self.dim,)
        if self.task_head:
            layer = self.task_head.shapes(self.dim)
            return shapes | {f"head.{name}": shape for name, shape in layer.items()}
        return shapes if self.tie_embeddings else {**shapes, "head.proj.weight": ends}

    def flops_per_token(self, seq_len: int) -> float:
        """Return floating-point operations a token of one training step."""
        # Half of the scores of causal attention are not needed.
        times = 2 if self.is_bidirectional else 1
        blocks = sum(
            self.matmul_parameters(number) + times * self.attention_multiplications(number, seq_len)
            for number in range(self.trained_blocks)
        )
        # Two operations a weight in the forward pass, four in the backward pass. The head
        # multiplies; the embedding is a lookup and does not count.
        return 6.0 * (blocks + self.dim * self.head_rows)

    @property
    def embed_cost(self) -> float:
        """The memory traffic of looking up and updating a row over a block's products.

        A row is read in fp32 and written in bf16; its gradient is read, and added to one in fp32:
        16 bytes an element. In the time of a byte a GPU multiplies and adds about 150 times (H100:
        989e12 operations and 3.35e12 bytes a second); a weight does so three times a token.
        """
        return 16 * 150 / 3 / self._mean_matmul_width

    @property
    def head_cost(self) -> float:
        """The projection's products over those of a block's weights."""
        return self.head_rows / self._mean_matmul_width

    @property
    def head_rows(self) -> int:
        """Rows of the head's projection: the vocabulary, or the outputs of a task's head."""
        return self.task_head.outputs if self.task_head else self.vocab

    @property
    def _mean_matmul_width(self) -> float:
        """The mean over blocks of their weights that multiply, over `dim`."""
        parameters = sum(self.matmul_parameters(number) for number in range(self.n_layers))
        return parameters / self.n_layers / self.dim

    def hf_config(self) -> dict[str, Any]:
        """Return what all decoders say in config.json, as transformers 5 writes it."""
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.frequency_scaling is not None:
            rope |= self.frequency_scaling.hf_config()
        head = self.task_head
        ending = HF_CLASSES[head.kind] if head else "ForCausalLM"
        return {
            **({"architectures": [f"{self.hf_class}{ending}"]} if self.hf_class else {}),
            "hidden_act": "silu",
            "attention_bias": False,
            "hidden_size": self.dim,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_seq_len,
            "rms_norm_eps": self.norm_eps,
            "rope_parameters": rope,
            "tie_word_embeddings": self.tie_embeddings,
            **({"is_causal": False} if self.is_bidirectional else {}),
            **(head.hf_config() if head else {}),
        }

    @property
    def hf_body(self) -> str:
        """Where transformers' model of this kind has the layers below its head."""
        return self.task_head.hf_body(self.hf_class) if self.task_head else super().hf_body

    def require_hf(self) -> None:
        """Raise a ValueError of what the Hugging Face models of the family cannot be."""
        if self.task_head:
            self.task_head.require_hf(self.hf_class, self.hf_heads)
        moe: MoESettings | None = getattr(self, "moe", None)
        if moe and not self.layout.to_hf("layers.0.mlp.router.bias"):
            moe.require(balance_bias=False)
