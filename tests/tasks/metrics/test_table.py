"""The table by which recipes are checked is that of the installed torchmetrics."""

import pkgutil
from importlib import import_module

import pytest
from torchmetrics import functional

from tests.tasks.metrics.table import PATH, render
from trainer.engine.core.errors import RecipeError
from trainer.engine.recipe.load import load_recipe
from trainer.engine.tasks.language_modeling.config import LanguageModeling
from trainer.engine.tasks.metrics.tables import LIBRARY, Outputs, metrics

OUTPUTS = {
    "binary": Outputs("binary"),
    "multiclass": Outputs("multiclass", 4),
    "multilabel": Outputs("multilabel", 3),
    "regression": Outputs("regression"),
    "tokens": Outputs("multiclass", has_scores=False),
}


def mismatches(kind, **table):
    config = metrics[table["name"]].model_validate(table)
    return [(key, message) for key, message, _ in config.mismatches(OUTPUTS[kind])]


def test_the_table_is_up_to_date():
    assert PATH.read_text("utf-8") == render(), "run python -m tests.tasks.metrics.table"


def test_every_function_of_torchmetrics_is_offered_or_has_a_reason():
    packages = [each.name for each in pkgutil.iter_modules(functional.__path__) if each.ispkg]
    modules = [import_module(f"torchmetrics.functional.{name}") for name in packages]
    public = {name for each in [functional, *modules] for name in getattr(each, "__all__", ())}
    assert len(public) > 200
    assert public - metrics.unsupported.keys() == set(LIBRARY)
    assert not metrics.unsupported.keys() & set(metrics)


def test_metrics_of_each_kind_are_there():
    expected = {
        "binary": {"accuracy", "auroc", "average_precision", "f1_score", "calibration_error"},
        "multiclass": {"accuracy", "auroc", "cohen_kappa", "confusion_matrix", "rand_score"},
        "multilabel": {"hamming_distance", "multilabel_ranking_loss", "exact_match"},
        "regression": {"mean_squared_error", "pearson_corrcoef", "r2_score", "spearman_corrcoef"},
    }
    for kind, names in expected.items():
        assert names <= {name for name in metrics if kind in metrics[name].kinds}


@pytest.mark.parametrize(
    ("kind", "table", "key"),
    [
        ("binary", {"name": "r2_score"}, "name"),
        ("binary", {"name": "accuracy", "top_k": 2}, "top_k"),
        ("multiclass", {"name": "accuracy", "threshold": 0.3}, "threshold"),
        ("multiclass", {"name": "accuracy", "top_k": 5}, "top_k"),
        ("multiclass", {"name": "f1_score", "average": "none", "over": "batch"}, "over"),
        ("tokens", {"name": "auroc"}, "name"),
        ("tokens", {"name": "accuracy", "top_k": 2}, "name"),
        ("tokens", {"name": "f1_score", "average": "macro"}, "average"),
    ],
)
def test_what_has_no_meaning_for_the_outputs_is_named(kind, table, key):
    ((found, message),) = mismatches(kind, **table)
    assert found == key
    assert message


def test_directions_are_known():
    better = {"accuracy": True, "mean_squared_error": False, "auroc": True, "specificity": True}
    assert {name: metrics[name].higher_is_better for name in better} == better
    unknown = [name for name in metrics if metrics[name].higher_is_better is None]
    assert unknown == ["confusion_matrix", "precision_recall_curve", "roc", "stat_scores"]


ACCURACY = "[[evaluate.metrics]]\nname = 'accuracy'\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[evaluate.metrics]]\nname = 'acuracy'", 'named "acuracy"; did you mean "accuracy"'),
        (
            "[[evaluate.metrics]]\nname = 'bleu_score'",
            'needs generated text, which the task "language_modeling" does not give',
        ),
        (
            "[task]\nname = 'nothing'\n[[evaluate.metrics]]\nname = 'bleu_score'",
            'the metric "bleu_score" needs generated text',
        ),
        ("[[evaluate.metrics]]\nname = 'perplexity'", "has perplexity already"),
        ("[[evaluate.metrics]]\nname = 'binary_auroc'", 'is written "auroc"'),
        ("[[evaluate.metrics]]\nname = 'zzzz'", "`trainer list metric` names all"),
        ("[[evaluate.metrics]]\nname = 'f1_score'\naverage = 'makro'", 'did you mean "macro"'),
        (f"{ACCURACY}topk = 1", 'unknown key "topk"; did you mean "top_k"'),
        (f"{ACCURACY}threshold = 0.2", "no meaning for multiclass outputs"),
        (ACCURACY * 2, 'another number of an evaluation is named "accuracy"'),
        (f"{ACCURACY}key = 'loss'", 'another number of an evaluation is named "loss"'),
        ("[evaluate]\nmetric = 'acc'\n" + ACCURACY, 'named "acc"; did you mean "accuracy"'),
        (
            "[evaluate]\nmetric = 'stat_scores'\n[[evaluate.metrics]]\nname = 'stat_scores'",
            "stat_scores is several numbers",
        ),
    ],
)
def test_a_recipe_is_checked_without_torchmetrics(text, message, tmp_path, monkeypatch):
    monkeypatch.setattr(LanguageModeling, "outputs", lambda self, loss: OUTPUTS["multiclass"])
    path = tmp_path / "r.toml"
    path.write_text(f"[run]\nsteps = 1\n{text}\n")
    with pytest.raises(RecipeError) as error:
        load_recipe(path, [])
    assert message in error.value.render()


def test_a_task_without_outputs_has_no_metrics(tmp_path, monkeypatch):
    monkeypatch.setattr(LanguageModeling, "outputs", lambda self, loss: None)
    path = tmp_path / "r.toml"
    path.write_text(f"[run]\nsteps = 1\n{ACCURACY}")
    with pytest.raises(RecipeError, match="has no outputs that metrics can measure"):
        load_recipe(path, [])
