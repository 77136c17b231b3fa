"""Recipe tables of torchmetrics' functions, made from the table of their signatures. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from operator import or_
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, create_model

from ...core.text.display import list_words
from .tables import LIBRARY, Kind, MetricConfig, MetricFunction, Outputs

DESCRIPTIONS = {
    "adjusted": "number of independent regressors, for the adjusted score; 0: not adjusted",
    "average": '"micro": over all samples; "macro": the mean over classes; "weighted": by samples '
    'of the class; "none": a number for each class',
    "average_method": "mean of the two entropies that normalises",
    "base": "base of the logarithm",
    "beta": "weight of recall against precision; above 1 favours recall",
    "block_size": "side of a block, in pixels",
    "bias_correction": "correct the bias of small samples",
    "include_background": "count class 0 too",
    "data_range": "difference of the largest and least value, or the pair of them to clamp to",
    "filter_length": "taps of the distortion filter",
    "fpr_range": "least and largest false positive rate of the area",
    "ignore_index": "targets of this value do not count",
    "log_prob": "the numbers are log-probabilities",
    "mouth_map": "numbers of the vertices of the mouth",
    "max_fpr": "largest false positive rate of a partial area",
    "min_precision": "precision that is reached at least",
    "min_recall": "recall that is reached at least",
    "min_sensitivity": "sensitivity that is reached at least",
    "min_specificity": "specificity that is reached at least",
    "multiclass_mode": "how classes are compared",
    "multioutput": "how several outputs are averaged",
    "n_bins": "bins of confidence",
    "nan_replace_value": "what replaces NaN",
    "nan_strategy": "whether samples with NaN are dropped or replaced",
    "norm": "norm of the errors of bins",
    "normalization": "what the error is divided by",
    "normalize": "divide by the samples of each target, each prediction, or all",
    "per_class": "a number for each class, over the maps that have it",
    "p": "exponent of the norm, at least 1",
    "power": "power of the variance: 0 normal, 1 Poisson, 2 gamma",
    "ratio": "ratio of the resolutions of high and low",
    "reduction": "how samples are averaged",
    "segmentation.average": 'of each map; "micro": of all classes together; "macro": the mean over '
    'classes; "weighted": by size of the class; "none": a number for each class',
    "scale_invariant": "scale the targets to the predictions",
    "sigma_n_sq": "variance of the noise of seeing",
    "squared": "square the error; false takes the root, or no square",
    "threshold": "probability from which a sample is positive",
    "thresholds": "number of thresholds, or a list of them, to save memory; default: exact",
    "top_k": "a sample is right if its class is among the k most probable",
    "variant": "variant of Kendall's tau",
    "weight_type": "weight of a class: 1 / size^2, 1 / size, or 1",
    "weights": "weights of disagreements",
    "window_size": "side of the window, in pixels",
    "zero_division": "the value of 0 / 0",
    "zero_mean": "subtract the means first",
}
_SHARE = Field(ge=0, le=1)
_LIMITS: dict[str, dict[str, Any]] = {
    "adjusted": {"int": Field(ge=0)},
    "base": {"float": Field(gt=1)},
    "beta": {"float": Field(gt=0)},
    "block_size": {"int": Field(ge=1)},
    "data_range": {"float": Field(gt=0)},
    "filter_length": {"int": Field(ge=1)},
    "max_fpr": {"float": Field(gt=0, le=1)},
    "min_precision": {"float": _SHARE},
    "min_recall": {"float": _SHARE},
    "min_sensitivity": {"float": _SHARE},
    "min_specificity": {"float": _SHARE},
    "mouth_map": {"ints": Field(min_length=1)},
    "n_bins": {"int": Field(ge=1)},
    "p": {"int": Field(ge=1), "float": Field(ge=1)},
    "ratio": {"float": Field(gt=0)},
    "sigma_n_sq": {"float": Field(gt=0)},
    "thresholds": {"int": Field(ge=2), "floats": Field(min_length=1)},
    "top_k": {"int": Field(ge=1)},
    "window_size": {"int": Field(ge=1)},
    "zero_division": {"float": _SHARE},
}
"""key -> type -> bounds of the values that functions take"""
_TYPES: dict[str, Any] = {
    "bool": bool,
    "int": int,
    "float": float,
    "floats": list[float],
    "ints": list[int],
    "pair": Annotated[tuple[float, float], Field(strict=False)],
    "none": None,
}
# What the functions do with [N, K], read in torchmetrics 1.9 and compared by a test.
_BY_TARGET = {
    "critical_success_index",
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_squared_error",
    "mean_squared_log_error",
    "minkowski_distance",
    "symmetric_mean_absolute_percentage_error",
    "tweedie_deviance_score",
    "weighted_mean_absolute_percentage_error",
}
_BY_OUTPUT = {"explained_variance", "r2_score", "relative_squared_error"}
_CLASSES_NOT_SCORES = ("nominal", "clustering")
_AVERAGES = {"average", "multioutput"}
_MAPS = "segmentation"
_NAMES = {"squad": ("exact_match", "f1")}
"""names of the numbers of functions that return a dictionary"""


class LibraryMetric(MetricConfig):
    """Base of the tables of torchmetrics' functions."""

    package: ClassVar[str]
    """the part of torchmetrics.functional that has the function"""
    kinds_of_keys: ClassVar[Mapping[str, list[str]]]
    """outputs for which a key matters, by key; a key that is not listed always does"""
    takes_labels: ClassVar[bool]
    several: ClassVar[Sequence[Kind]]
    """outputs for which the function returns several numbers whatever the keys are"""
    is_by_output: ClassVar[bool]
    """whether a regression with several outputs has one result for each output"""
    curve: ClassVar[Sequence[str]]
    """names of the axes, if the function returns a curve"""

    def is_scalar(self, outputs: Outputs) -> bool:
        """Return whether the function returns one number."""
        arguments = self.arguments(outputs)
        if self.name in _NAMES or arguments.get("per_class"):
            return False
        if outputs.kind == "regression" and self.is_by_output and outputs.num_classes > 1:
            return False
        # None is torchmetrics' other word for "none".
        return outputs.kind not in self.several and not any(
            arguments[key] in (None, "none", "raw_values") for key in _AVERAGES & arguments.keys()
        )

    @property
    def is_sample_mean(self) -> bool:
        """Whether the function measures one sample, a map of classes or an answer."""
        return self.package == _MAPS or self.name in _NAMES

    def numbers(self, outputs: Outputs) -> Sequence[str]:
        """Return the names of the numbers of a map or an answer."""
        if self.name in _NAMES or self.is_scalar(outputs):
            return _NAMES.get(self.name, ("",))
        first = int(not getattr(self, "include_background", True))
        labels = outputs.labels or range(outputs.num_classes or 2)
        return [str(each) for each in labels[first:]]

    @property
    def missing(self) -> Literal["targets", "outputs", "samples"]:
        """What a missing target leaves out: see `MetricConfig.missing`."""
        if self.name in _BY_TARGET:
            return "targets"
        is_weighted = getattr(self, "multioutput", "") == "variance_weighted"
        by_output = self.is_by_output or self.name in _BY_OUTPUT
        return "outputs" if by_output and not is_weighted else "samples"

    @property
    def averages_outputs(self) -> bool:
        """Whether the metric is the mean of the numbers of columns."""
        return self.name in _BY_OUTPUT and getattr(self, "multioutput", "") != "raw_values"

    def uses_labels(self, outputs: Outputs) -> bool:
        """Return whether predicted classes suffice."""
        if self.package in _CLASSES_NOT_SCORES:
            return True
        is_best = getattr(self, "top_k", None) in (1, None)
        return self.takes_labels and is_best and outputs.kind == "multiclass"

    def arguments(self, outputs: Outputs) -> dict[str, Any]:
        """Return the keyword arguments of the function."""
        own = type(self).model_fields.keys() - MetricConfig.model_fields.keys()
        return {key: getattr(self, key) for key in sorted(own) if self._matters(key, outputs)}

    def mismatches(self, outputs: Outputs) -> Iterator[tuple[str, str, str]]:
        """Yield what does not fit a task's outputs, keys without effect included."""
        yield from super().mismatches(outputs)
        if self.package == _MAPS and outputs.kind in self.kinds and not outputs.may_be_maps:
            message = f'"{self.name}" needs a map of classes in each sample, not one class'
            yield "name", message, 'take one of single classes, such as "f1_score"'
        is_each = getattr(self, "average", "") not in ("", "micro")
        if is_each and not outputs.has_scores and self.uses_labels(outputs):
            # torchmetrics would make a table of all pairs of tokens.
            yield "average", "there are too many tokens for a number of each", 'take "micro"'
        for key in sorted(self.model_fields_set & self.kinds_of_keys.keys()):
            # A resolved recipe has every key: its defaults say nothing.
            is_given = getattr(self, key) != type(self).model_fields[key].default
            if is_given and outputs.kind in self.kinds and not self._matters(key, outputs):
                yield key, f"it has no meaning for {outputs.kind} outputs", "remove the key"
        top_k = getattr(self, "top_k", None)
        if top_k is not None and outputs.num_classes and top_k > outputs.num_classes:
            yield "top_k", f"there are {outputs.num_classes} classes", "give a smaller number"

    def _matters(self, key: str, outputs: Outputs) -> bool:
        return outputs.kind in self.kinds_of_keys.get(key, self.kinds)

    def build(self, outputs: Outputs) -> MetricFunction:
        """Return the function with its arguments."""
        from .adapter import bind_function

        return bind_function(self, outputs)


def __getattr__(name: str) -> type[LibraryMetric]:
    """Make the table of a function when a recipe names it."""
    if name not in LIBRARY:
        raise AttributeError(name)
    row = LIBRARY[name]
    fields: dict[str, Any] = {"name": (Literal[name], name)}
    for key, value in row["keys"].items():
        default = value.get("default", ...)
        description = DESCRIPTIONS.get(f"{row['package']}.{key}") or DESCRIPTIONS[key]
        fields[key] = (_type(key, value, row), Field(default, description=description))
    kinds = row["kinds"]
    config = create_model(name, __base__=LibraryMetric, __module__=__name__, **fields)
    config.__doc__ = f"`{name}` of torchmetrics, for {list_words(kinds)} outputs."
    config.kinds, config.package = tuple(kinds), row["package"]
    config.higher_is_better, config.takes_labels = row["higher_is_better"], "labels" in row
    config.several, config.curve = row.get("several", ()), row.get("curve", ())
    config.is_by_output = "by_output" in row
    config.kinds_of_keys = {k: v["kinds"] for k, v in row["keys"].items() if "kinds" in v}
    globals()[name] = config
    return config


def _type(key: str, value: Mapping[str, Any], row: Mapping[str, Any]) -> Any:
    limits = _LIMITS.get(key, {})
    if row["package"] == "classification" and key in ("threshold", "thresholds", "fpr_range"):
        limits = {"pair": AfterValidator(_require_range), "float": _SHARE} | limits
        limits["floats"] = AfterValidator(_require_shares)
    if key == "power":
        limits = {"float": AfterValidator(_require_power)}
    options = [
        Annotated[_TYPES[word], limits[word]] if word in limits else _TYPES[word]
        for word in value.get("types", [])
    ]
    if words := value.get("words"):
        options.insert(0, Literal[tuple(words)])
    return reduce(or_, options)


def _require_shares(thresholds: list[float]) -> list[float]:
    if not thresholds or not all(0 <= each <= 1 for each in thresholds):
        raise ValueError("thresholds are probabilities, from 0 to 1, and at least one")
    return thresholds


def _require_range(rates: tuple[float, float]) -> tuple[float, float]:
    if not 0 <= rates[0] < rates[1] <= 1:
        raise ValueError("the least rate is below the largest, and both are from 0 to 1")
    return rates


def _require_power(power: float) -> float:
    if 0 < power < 1:
        raise ValueError("there is no Tweedie distribution of a power between 0 and 1")
    return power
