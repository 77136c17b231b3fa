"""DeepSeek-V3's and V2's sizes, from the config.json of their published models. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, model_validator

from ..decoder_config import DecoderConfig
from ..heads import TaskHead
from ..layers.configs import LatentSizes, MoESettings
from ..layers.rope_scaling import YarnScaling
from ..matrices import HeadRows
from ..sizes import PositiveFloat, Size
from .layout import LAYOUT

if TYPE_CHECKING:
    from ...kernels.choose import Kernels
    from .model import DeepSeekV3

PUBLISHED = {
    "kv_lora_rank": 512,
    "nope_head_dim": 128,
    "rope_head_dim": 64,
    "value_head_dim": 128,
    "max_seq_len": 163840,
    "init_std": 0.006,
}
"""init_std: arXiv:2405.04434, section 3.1.2, and arXiv:2412.19437, section 4.2"""
V2 = {"num_shared": 2, "normalize": False, "group_score": "max", "aux_weight": 3e-3}
"""arXiv:2405.04434, section 3.1.2"""
V3 = {"num_shared": 1, "score": "sigmoid", "balance_bias": True}
Count = Annotated[int, Field(ge=0, le=2**31)]


class DeepSeekV3Config(DecoderConfig, LatentSizes):
    """DeepSeek-V3 and V2: latent attention, some dense blocks, then shared and routed experts."""

    layout: ClassVar = LAYOUT
    flavors: ClassVar = {
        "debug": {"moe": V3},
        "16b": {
            **PUBLISHED,
            "dim": 2048,
            "n_layers": 27,
            "n_heads": 16,
            "ffn_dim": 10944,
            "n_dense_layers": 1,
            "vocab_size": 102400,
            "rope_scaling": {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707},
            "moe": {
                **V2,
                "num_experts": 64,
                "experts_per_token": 6,
                "expert_ffn_dim": 1408,
            },
        },
        "236b": {
            **PUBLISHED,
            "dim": 5120,
            "n_layers": 60,
            "n_heads": 128,
            "q_lora_rank": 1536,
            "ffn_dim": 12288,
            "n_dense_layers": 1,
            "vocab_size": 102400,
            "rope_scaling": {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            "moe": {
                **V2,
                "num_experts": 160,
                "experts_per_token": 6,
                "expert_ffn_dim": 1536,
                "scale": 16.0,
                "groups": 8,
                "groups_per_token": 3,
            },
        },
        "671b": {
            **PUBLISHED,
            "dim": 7168,
            "n_layers": 61,
            "n_heads": 128,
            "q_lora_rank": 1536,
            "ffn_dim": 18432,
            "n_dense_layers": 3,
            "vocab_size": 129280,
            "rope_scaling": {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            "moe": {
                "num_experts": 256,
                "experts_per_token": 8,
                **V3,
                "expert_ffn_dim": 2048,
                "scale": 2.5,
                "groups": 8,
                "groups_per_token": 4,
                "aux_weight": 1e-4,
            },
            "mtp_depth": 1,
        },
    }

    name: Literal["deepseek_v3"] = "deepseek_v3"
    norm_eps: PositiveFloat = 1e-6
    """added to the mean square in each norm"""
    ffn_dim: Size = 192
    """width inside the feed-forward layer of blocks without experts"""
    n_dense_layers: Count = 1
    """so many blocks at the start are without experts"""
    moe: MoESettings = MoESettings.model_validate(V3)
    """experts of the other blocks"""
    rope_scaling: YarnScaling | None = None
    """stretching of the rotary frequencies; none leaves them alone"""
    mtp_depth: Count = 0
    """so many tokens after the next are predicted too, in training, by a block more each"""
    mtp_weight: NonNegativeFloat = 0.3
    """weight of the mean loss of these predictions"""

    @property
    def predictions(self) -> int:
        """How many further tokens are predicted: by a task's head, none."""
        return 0 if self.task_head else self.mtp_depth

    @property
    def rotary_width(self) -> int:
        """The width of the part of a head that is rotated."""
        return self.rope_head_dim

    @property
    def head_width(self) -> int:
        """Width of a head's query and key."""
        return self.key_head_dim

    @property
    def n_kv_heads(self) -> int:
        """The number of key-value heads: each query head has its own."""
        return self.n_heads

    @property
    def query_scale(self) -> float:
        """The factor of the scores, beside 1 / sqrt(K)."""
        return 1.0 if self.rope_scaling is None else self.rope_scaling.query_scale

    def attention_rows(self) -> dict[str, HeadRows]:
        """Return how the rows of a block's attention belong to heads, by the name of a module."""
        nope, rope, value = self.nope_head_dim, self.rope_head_dim, self.value_head_dim
        # All heads share the rotated part of keys: their queries get all of the factor there.
        queries = HeadRows(self.n_heads, (nope + rope,), ((nope, 0.5), (rope, 1.0)))
        pairs = HeadRows(self.n_heads, (nope, value), ((nope, 0.5), (value, 0.0)))
        return {
            "attention.q" if self.q_lora_rank is None else "attention.q_up": queries,
            "attention.kv_up": pairs,
        }

    def experts_of(self, number: int) -> MoESettings | None:
        """Return the experts of block `number`; the first `n_dense_layers` blocks have none."""
        return None if number < min(self.n_dense_layers, self.n_layers) else self.moe

    def attention_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name and shape of the parameters of a block's attention."""
        return self.latent_shapes(self.dim, self.n_heads)

    def block_shapes(self, number: int) -> dict[str, tuple[int, ...]]:
        """Return name and shape of a block's parameters."""
        shapes = super().block_shapes(number)
        if number < self.n_layers:
            return shapes
        norms = ("embed_norm", "hidden_norm", "join", "norm")
        more = {f"{name}.weight": (self.dim,) for name in norms}
        return {**shapes, **more, "join.weight": (self.dim, 2 * self.dim)}

    def attention_multiplications(self, number: int, seq_len: int) -> float:
        """Return the multiplications a token of scores and weighted values."""
        # Counted as attention over heads, which training computes; the latents' form is for
        # decoding.
        return self.n_heads * (self.key_head_dim + self.value_head_dim) / 2 * seq_len

    def flops_per_token(self, seq_len: int) -> float:
        """Return floating-point operations a token of one training step."""
        # The head computes logits once more for each further token.
        further = self.trained_predictions * self.dim * self.vocab
        return super().flops_per_token(seq_len) + 6.0 * further

    @model_validator(mode="after")
    def _check_predictions(self) -> Self:
        if self.mtp_depth and self.is_bidirectional:
            raise ValueError("mtp_depth predicts later tokens, which bidirectional attention sees")
        return self

    @property
    def shares_embedding(self) -> bool:
        """Whether the last stage of a pipeline computes with the embedding's weight."""
        return self.is_tied or self.trained_predictions > 0

    @property
    def head_cost(self) -> float:
        """What the head costs, with the blocks that predict further tokens, where a block costs 1.

        Each of them ends in the same projection.
        """
        return super().head_cost * (1 + self.trained_predictions) + self.trained_predictions

    @property
    def hf_version(self) -> int:
        """Which DeepSeek's code computes this model."""
        return 2 if self.moe.score == "softmax" else 3

    @property
    def hf_class(self) -> str:  # type: ignore[override]  # a name for each version
        """What the names of transformers' classes of this model begin with."""
        return f"DeepseekV{self.hf_version}"

    @property
    def hf_heads(self) -> tuple[TaskHead, ...]:  # type: ignore[override]  # as above
        """The kinds of heads that transformers has for this version."""
        heads: tuple[TaskHead, ...] = ("sequence_classification", "token_classification")
        return heads[: self.hf_version - 1]

    def require_hf(self) -> None:
        """Raise a ValueError where neither V3's nor V2's published code computes this model."""
        is_third = self.moe.score == "sigmoid"
        fixed: dict[str, object] = {"balance_bias": is_third, "shared_ffn_dim": None}
        if not is_third:
            fixed["normalize"] = False
        if self.moe.is_grouped:
            fixed["group_score"] = "top2" if is_third else "max"
        if not self.moe.num_shared:
            fixed["num_shared"] = 1
        self.moe.require(**fixed)
        super().require_hf()

    def hf_config(self) -> dict[str, Any]:
        """Return what transformers' `DeepseekV3Config` or `DeepseekV2Config` says of this model."""
        moe, further = self.moe, self.predictions
        # transformers' DeepSeek-V2 picks its routing by `topk_method`.
        method, is_third = "noaux_tc", self.hf_version == 3
        if not is_third:
            method = "group_limited_greedy" if moe.is_grouped else "greedy"
        return {
            "model_type": f"deepseek_v{self.hf_version}",
            **super().hf_config(),
            "num_key_value_heads": self.n_heads,
            "q_lora_rank": self.q_lora_rank,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_nope_head_dim": self.nope_head_dim,
            "qk_rope_head_dim": self.rope_head_dim,
            "v_head_dim": self.value_head_dim,
            "intermediate_size": self.ffn_dim,
            "first_k_dense_replace": self.n_dense_layers,
            "n_routed_experts": moe.num_experts,
            "num_experts_per_tok": moe.experts_per_token,
            "moe_intermediate_size": moe.expert_ffn_dim,
            "n_shared_experts": moe.num_shared,
            "norm_topk_prob": moe.normalize,
            "routed_scaling_factor": moe.scale,
            "n_group": moe.groups,
            "topk_group": moe.groups_per_token,
            "scoring_func": moe.score,
            "aux_loss_alpha": moe.aux_weight,
            "initializer_range": self.init_std,
            "topk_method": method,
            # Where it is left out, transformers takes 1 for V3; it knows no such key of V2.
            **({"num_nextn_predict_layers": further} if further or is_third else {}),
        }

    @classmethod
    def flatten_hf(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return config.json as transformers' model of this family understands it."""
        flat = super().flatten_hf(settings)
        if flat.get("model_type") == "deepseek_v2" and flat.get("topk_method") == "greedy":
            # Groups are there in published files, and this method leaves them alone.
            flat |= {"n_group": 1, "topk_group": 1}
        return flat

    @classmethod
    def sizes_from_hf(cls, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of `[model]` that config.json says.

        Raises:
            SettingsError: a size is missing, or the family cannot compute what is asked for.
        """
        sizes = super().sizes_from_hf(settings)
        is_third = settings.get("model_type") == "deepseek_v3"
        # config.json has no key for them: the code of each version fixes them.
        sizes["moe"] |= {"group_score": "top2" if is_third else "max", "balance_bias": is_third}
        return sizes

    def hf_further_blocks(self, settings: Mapping[str, Any]) -> tuple[str, ...]:
        """Return what names in a folder begin with of predictions that this model leaves out."""
        depth = self.flatten_hf(settings).get("num_nextn_predict_layers")
        end = self.n_layers + (depth if isinstance(depth, int) else 0)
        return tuple(f"model.layers.{number}." for number in range(self.num_blocks, end))

    def build(self, kernels: Kernels) -> DeepSeekV3:
        """Return the module."""
        from .model import DeepSeekV3

        return DeepSeekV3(self, kernels)
