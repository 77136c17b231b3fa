"""Criteria give sums and counts whose ratio is torch's own mean, however samples are divided."""

import pytest
import torch
import torch.nn.functional as F

from trainer.engine.tasks.criteria import ClassCrossEntropy, ConnectionistTemporal, Elementwise
from trainer.engine.tasks.tables import losses


def mean(criterion, outputs, fields, parts=(3, 5)):
    """Return the mean over samples that are divided into unequal parts."""
    pieces = [
        (output, dict(zip(fields, columns, strict=True)))
        for output, *columns in zip(
            outputs.split(list(parts)),
            *(x.split(list(parts)) for x in fields.values()),
            strict=True,
        )
    ]
    total = sum(criterion.sums(output, part)["loss"] for output, part in pieces)
    return total / sum(criterion.counts(part)["loss"] for _, part in pieces)


@pytest.mark.parametrize("weights", [(), (0.5, 2.0, 1.0, 0.0)])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_cross_entropy_of_classes_is_torchs(weights, smoothing):
    torch.manual_seed(0)
    outputs = torch.randn(8, 5, 4, dtype=torch.float64).float()
    labels = torch.randint(0, 4, (8, 5))
    labels[2, 1:] = labels[7] = -100
    found = mean(ClassCrossEntropy(smoothing, weights), outputs, {"labels": labels})
    wanted = F.cross_entropy(
        outputs.flatten(0, 1).double(),
        labels.flatten(),
        weight=torch.tensor(weights).double() if weights else None,
        label_smoothing=smoothing,
    )
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("name", "options", "reference"),
    [
        ("mse", {}, F.mse_loss),
        ("l1", {}, F.l1_loss),
        ("huber", {"delta": 0.5}, lambda x, y: F.huber_loss(x, y, delta=0.5)),
        ("bce", {}, lambda x, y: F.binary_cross_entropy_with_logits(x, y)),
    ],
)
def test_losses_of_elements_are_torchs_and_skip_missing_targets(name, options, reference):
    torch.manual_seed(0)
    outputs, labels = torch.randn(8, 3), torch.rand(8, 3)
    labels[1, 2] = labels[6, 0] = torch.nan
    criterion = losses[name](**options).build_criterion()
    assert isinstance(criterion, Elementwise)
    found = mean(criterion, outputs, {"labels": labels})
    known = ~labels.isnan()
    wanted = reference(outputs[known].double(), labels[known].double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0)


def test_alignment_free_labels_are_torchs():
    torch.manual_seed(0)
    outputs, labels = torch.randn(8, 12, 6), torch.randint(1, 6, (8, 4))
    lengths = {"input_lengths": torch.randint(9, 13, (8,)), "label_lengths": torch.tensor([4] * 8)}
    found = mean(ConnectionistTemporal(), outputs, {"labels": labels, **lengths})
    wanted = F.ctc_loss(
        outputs.double().log_softmax(-1).transpose(0, 1),
        labels,
        *lengths.values(),
        reduction="none",
    ).mean()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=0)
