"""Sizes of decoders whose query heads share key-value heads. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Self

from pydantic import model_validator

from .decoder_config import DecoderConfig
from .matrices import HeadRows
from .sizes import Size

if TYPE_CHECKING:
    from ..kernels.choose import Kernels
    from .language_model import LanguageModel


class GroupedQueryConfig(DecoderConfig):
    """A decoder whose attention is `GroupedQueryAttention`."""

    has_head_norms: ClassVar[bool] = False
    """whether each head's queries and keys have a norm before they are rotated (arXiv:2302.05442,
    section 2.1, with the norm of each head by itself)"""
    has_wide_norms: ClassVar[bool] = False
    """whether they have one instead of all heads' queries, and one of all heads' keys"""
    biases: ClassVar[str] = ""
    """which of the projections q, k, v and o have a bias"""

    n_kv_heads: Size = 2
    """key-value heads; n_heads is a multiple of it"""
    head_dim: Size | None = None
    """width of a head; default dim / n_heads"""

    @property
    def head_width(self) -> int:
        """Width of a head."""
        return self.head_dim or self.dim // self.n_heads

    @property
    def rotary_width(self) -> int:
        """The width of a head, all of which is rotated."""
        return self.head_width

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

    @model_validator(mode="after")
    def _check_windows(self) -> Self:
        if self.is_bidirectional and any(map(self.window_of, range(self.n_layers))):
            raise ValueError(
                f'attention = "bidirectional" is not for {self.name}: its windows look back'
            )
        return self

    @property
    def qk_norm_widths(self) -> tuple[int, int] | None:
        """The widths of the norms of queries and keys; None: there are none."""
        if self.has_wide_norms:
            return self.n_heads * self.head_width, self.n_kv_heads * self.head_width
        return (self.head_width, self.head_width) if self.has_head_norms else None

    @property
    def normalises_heads(self) -> bool:
        """Whether queries and keys have norms, which bound the scores of attention."""
        return self.qk_norm_widths is not None

    def attention_rows(self) -> dict[str, HeadRows]:
        """Return how the rows of a block's attention belong to heads, by the name of a module."""
        width, is_shared = self.head_width, self.n_kv_heads < self.n_heads
        # A key that several heads share is left alone: their queries get all of the factor.
        powers = {"q": 1.0 if is_shared else 0.5, "k": 0.0 if is_shared else 0.5, "v": 0.0}
        return {
            f"attention.{name}": HeadRows(
                self.n_heads if name == "q" else self.n_kv_heads, (width,), ((width, power),)
            )
            for name, power in powers.items()
        }

    @property
    def query_scale(self) -> float:
        """What queries are multiplied by, beside 1 / sqrt(K)."""
        return 1.0

    @property
    def score_softcap(self) -> float | None:
        """The softcap of attention scores, see `kernels.softcap`; None: scores are not capped."""
        return None

    def window_of(self, number: int) -> int | None:
        """Return how many positions block `number` sees, its own the last; None: all before."""
        return getattr(self, "window", None)

    def attention_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of the parameters of a block's attention."""
        queries, keys = self.n_heads * self.head_width, self.n_kv_heads * self.head_width
        shapes = self.norm_shapes("attention")
        for name, rows in {"q": queries, "k": keys, "v": keys, "o": self.dim}.items():
            shapes[f"attention.{name}.weight"] = (rows, queries if name == "o" else self.dim)
            if name in self.biases:
                shapes[f"attention.{name}.bias"] = (rows,)
        for name, width in zip(("q_norm", "k_norm"), self.qk_norm_widths or (), strict=False):
            shapes[f"attention.{name}.weight"] = (width,)
        return shapes

    def attention_multiplications(self, number: int, seq_len: int) -> float:
        """Return the multiplications a token of scores and weighted values.

        In a window W positions wide a query sees min(its position, W) keys: on average
        W (1 - W / 2 S).
        """
        window = self.window_of(number)
        # Scores and weighted values are two products of this size; causality halves them.
        seen: float = seq_len
        if window is not None and window < seq_len:
            seen = 2 * window - window**2 / seq_len
        return float(self.n_heads * self.head_width * seen)

    def hf_config(self) -> dict[str, Any]:
        """Return what these decoders say in config.json."""
        heads = {"num_key_value_heads": self.n_kv_heads, "head_dim": self.head_width}
        return {**super().hf_config(), **heads}

    def build(self, kernels: Kernels) -> LanguageModel:
        """Return the module; families whose blocks differ return their own."""
        from .decoder import GroupedQueryDecoder

        return GroupedQueryDecoder(self, kernels)
