"""Classification, distillation and evaluations, against their formulas."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from tests.known_bugs.catalogue import known_bug
from tests.known_bugs.runs import assembled, assert_equal, data_of, enlarge
from trainer.engine.tasks.classification import task as classification
from trainer.engine.tasks.distillation import losses
from trainer.engine.tasks.distillation.distill import SoftCriterion
from trainer.kernels.divergence import reference as divergence
from trainer.kernels.vocabulary import WHOLE

TEXTS = [{"text": "abcdef"[: 1 + n % 5], "label": "yes" if n % 3 else "no"} for n in range(8)]


def classified():
    """Return the loss of texts in padded rows, and torch's of each text alone."""
    task = {"name": "sequence_classification", "labels": ["no", "yes"]}
    data = data_of("classified", TEXTS, micro_batch=4)
    parts = assembled(task=task, data=data)
    enlarge(parts.model)
    (batch,) = next(parts.loader.steps(0))
    rows = zip(batch.tokens, batch.lengths.tolist(), strict=True)
    with torch.no_grad():
        outputs = [parts.model(row[:end].unsqueeze(0))[0, -1].double() for row, end in rows]
    expected = F.cross_entropy(torch.stack(outputs), batch.labels)
    return parts.step.accumulate([batch]).loss, expected


def take_the_token_before_the_end(patch):
    def is_last(batch):
        return batch.position_of_each == (batch.lengths.unsqueeze(1) - 2).clamp(min=0)

    patch.setattr(classification, "_is_last", is_last)


@known_bug(
    "huggingface/transformers#35352",
    "Where a text ends with the token that is also filler, its class was read one token too early.",
    take_the_token_before_the_end,
)
def the_class_of_a_text_is_read_at_its_last_token():
    found, expected = classified()
    assert_equal(found, expected)


def distilled(loss, hard_weight=0.0):
    """Return the summed divergence of random distributions, and both distributions in float64."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(6, 8), (20, 8)] * 2
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    student, teacher = tensors[:2], tensors[2:]
    criterion = loss.build(SimpleNamespace(vocabulary=WHOLE))
    labels = torch.zeros(6, dtype=torch.int64)
    found = criterion.compute(tuple(student), tuple(teacher), labels)[0]
    temperature = loss.temperature
    q, p = (
        (hidden.double() @ weight.double().T / temperature).softmax(1)
        for hidden, weight in (student, teacher)
    )
    return found, q, p


def kl(p, q):
    return (p * (p.log() - q.log())).sum()


def swap_the_mixture(patch):
    original = divergence.jensen_shannon

    def jensen_shannon(q, p, beta=0.5):
        return original(p, q, beta)

    patch.setattr(divergence, "jensen_shannon", jensen_shannon)


@known_bug(
    "huggingface/trl#3043",
    "The shares of student and teacher in the mixture of a generalised Jensen-Shannon divergence"
    " were swapped.",
    swap_the_mixture,
)
def the_mixture_of_jensen_shannon_has_the_teacher_s_share():
    found, q, p = distilled(losses.JensenShannon(beta=0.2))
    mixture = 0.2 * p + 0.8 * q
    assert_equal(found, 0.2 * kl(p, mixture) + 0.8 * kl(q, mixture))


def average_over_classes(patch):
    original = SoftCriterion.compute

    def compute(self, student, teacher, labels):
        return original(self, student, teacher, labels) / len(student[1])

    patch.setattr(SoftCriterion, "compute", compute)


@known_bug(
    "huggingface/trl#4105",
    "A divergence was averaged over the vocabulary too, so that it was too small by its size.",
    average_over_classes,
)
def a_divergence_is_a_sum_over_the_vocabulary():
    found, q, p = distilled(losses.ForwardKL())
    assert_equal(found, kl(p, q))
