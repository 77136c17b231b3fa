"""Heads of tasks other than language modelling, as settings and in config.json. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import Field, ValidationError

from .sizes import SettingsError, Size, Sizes, quote

TaskHead = Literal["sequence_classification", "token_classification", "question_answering"]
Problem = Literal["single", "multi", "regression"]

HF_CLASSES: dict[TaskHead, str] = {
    "sequence_classification": "ForSequenceClassification",
    "token_classification": "ForTokenClassification",
    "question_answering": "ForQuestionAnswering",
}
"""what the names of transformers' classes end with"""
OLD_ANSWERS = ("Llama", "Qwen2", "Qwen3", "Qwen3Moe")
"""classes whose question answering keeps the name `transformer` of older versions"""
HF_PROBLEMS: dict[Problem, str] = {
    "single": "single_label_classification",
    "multi": "multi_label_classification",
    "regression": "regression",
}
HF_KEYS = {
    "outputs": "num_labels",
    "labels": "id2label",
    "problem": "problem_type",
    "dropout": "classifier_dropout",
    "bias": "token_classification_bias",
}
HF_DROPOUT = 0.1
"""what transformers takes for token classification where config.json names no dropout"""
SCORE, ANSWER = "score", "qa_outputs"


class HeadSettings(Sizes):
    """A linear layer over the final hidden states of every position, after the final norm.

    Which positions count is the task's choice: sequence classification takes each text's last one.
    """

    kind: TaskHead = "sequence_classification"
    """which of Hugging Face's models it is a head of"""
    outputs: Size
    """rows of the layer: classes, targets of a regression, or 2 for the ends of an answer"""
    bias: bool = False
    """whether the layer has one"""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """share of the hidden states that training sets to zero before the layer"""
    labels: tuple[str, ...] = ()
    """names of the classes, in order; empty: they have none"""
    problem: Problem = "single"
    """of sequence classification: one class, several, or numbers"""

    @property
    def layer(self) -> str:
        """The name of the layer in the head's module, which is Hugging Face's."""
        return ANSWER if self.kind == "question_answering" else SCORE

    def shapes(self, dim: int) -> dict[str, tuple[int, ...]]:
        """Return name (inside of the head) and shape of the layer's parameters, in order."""
        weight = {f"{self.layer}.weight": (self.outputs, dim)}
        return {**weight, f"{self.layer}.bias": (self.outputs,)} if self.bias else dict(weight)

    def hf_body(self, hf_class: str) -> str:
        """Return where transformers' model has the layers below this head.

        Args:
            hf_class: what the names of the model's classes begin with.
        """
        is_answer = self.kind == "question_answering"
        return "transformer" if is_answer and hf_class in OLD_ANSWERS else "model"

    def require_hf(self, hf_class: str, kinds: Collection[TaskHead]) -> None:
        """Raise a ValueError of what transformers' head of this kind cannot be.

        Args:
            hf_class: what the names of the model's classes begin with.
            kinds: the heads that transformers has for the model.
        """
        if self.kind not in kinds:
            raise ValueError(f"transformers has no {hf_class}{HF_CLASSES[self.kind]}")
        if self.kind == "sequence_classification" and self.bias:
            raise ValueError("its score layer has no bias")
        if self.kind == "question_answering" and (self.outputs != 2 or not self.bias):
            raise ValueError("its head has 2 outputs and a bias")

    def hf_config(self) -> dict[str, Any]:
        """Return what config.json says of the head."""
        names = self.labels or tuple(f"LABEL_{number}" for number in range(self.outputs))
        found: dict[str, Any] = {
            "id2label": {str(number): name for number, name in enumerate(names)},
            "label2id": {name: number for number, name in enumerate(names)},
        }
        if self.kind == "sequence_classification":
            found["problem_type"] = HF_PROBLEMS[self.problem]
        if self.kind == "token_classification":
            found |= {"classifier_dropout": self.dropout, "token_classification_bias": self.bias}
        return found


def is_head_layer(name: str) -> bool:
    """Return whether a name, with any prefix, is one of the layer of a task's head.

    Weights of a language model have none: there the layer starts with initial values.
    """
    module, _, layer = name.rpartition(".")[0].rpartition(".")
    return layer in (SCORE, ANSWER) and module.rpartition(".")[2] == "head"


def read_head(settings: Mapping[str, Any]) -> HeadSettings | None:
    """Return the head that config.json describes; None for the language head.

    Raises:
        SettingsError: the head's settings are impossible.
    """
    (name,) = [*_list(settings.get("architectures")), ""][:1]
    kind = next((kind for kind, ending in HF_CLASSES.items() if str(name).endswith(ending)), None)
    if kind is None:
        return None
    if kind == "question_answering":
        return HeadSettings(kind=kind, outputs=2, bias=True)
    labels = _labels(settings)
    outputs, problem = len(labels) or settings.get("num_labels", 2), settings.get("problem_type")
    if problem is None:
        # As transformers decides, but that it also looks at the labels of the first batch.
        problem = HF_PROBLEMS["regression" if outputs == 1 else "single"]
    given: dict[str, Any] = {
        "kind": kind,
        "outputs": outputs,
        # The names that transformers makes up say nothing.
        "labels": () if all(name.startswith("LABEL_") for name in labels) else labels,
        "problem": next(
            (ours for ours, theirs in HF_PROBLEMS.items() if theirs == problem), problem
        ),
    }
    if kind == "token_classification":
        dropouts = (settings.get("classifier_dropout"), settings.get("hidden_dropout"), HF_DROPOUT)
        given["dropout"] = next(rate for rate in dropouts if rate is not None)
        given["bias"] = settings.get("token_classification_bias", True)
    try:
        return HeadSettings.model_validate(given)
    except ValidationError as error:
        wrong = [(HF_KEYS[str(each["loc"][0])], quote(each["input"])) for each in error.errors()]
        raise SettingsError([f"config.json says {key} = {value}" for key, value in wrong]) from None


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _labels(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of config.json's `id2label`, in the order of its numbers.

    Raises:
        SettingsError: its keys are not 0, 1, 2, ..., or a name is no text.
    """
    table = settings.get("id2label")
    if table is None:
        return ()
    if isinstance(table, dict):
        names = tuple(table.get(str(number)) for number in range(len(table)))
        if all(isinstance(name, str) for name in names):
            return cast("tuple[str, ...]", names)
    raise SettingsError([f"config.json says id2label = {quote(table)}"])
