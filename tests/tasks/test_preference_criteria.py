"""Criteria of preferences against the formulas of their papers, written out in float64."""

import math

import pytest
import torch

from trainer.engine.tasks.preference import criteria
from trainer.engine.tasks.preference.criteria import Answers

PAIRS = 16


def sides():
    torch.manual_seed(0)
    return [
        Answers(
            (-torch.rand(PAIRS, dtype=torch.float64) * 40 - 1).requires_grad_(),
            torch.randint(3, 30, (PAIRS,)),
            -torch.rand(PAIRS, dtype=torch.float64) * 40 - 1,
        )
        for _ in range(2)
    ]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def numbers(chosen, rejected):
    """Yield (log-probability, tokens, reference) of both answers of each pair as floats."""
    for values in zip(
        *(
            column.tolist()
            for each in (chosen, rejected)
            for column in (each.log_probs, each.tokens, each.reference)
        ),
        strict=True,
    ):
        yield values[:3], values[3:]


def derivatives(losses, chosen, rejected):
    grads = torch.autograd.grad(losses.sum(), (chosen.log_probs, rejected.log_probs))
    return [each.tolist() for each in grads]


def test_dpo_and_its_gradient_are_the_papers():
    chosen, rejected = sides()
    scores = criteria.dpo(chosen, rejected, beta=0.3, label_smoothing=0)
    of_chosen, of_rejected = derivatives(scores.losses, chosen, rejected)
    for row, ((w, _, w_ref), (x, _, x_ref)) in enumerate(numbers(chosen, rejected)):
        rewards = 0.3 * (w - w_ref), 0.3 * (x - x_ref)
        margin = rewards[0] - rewards[1]
        assert scores.losses[row].item() == pytest.approx(-math.log(sigmoid(margin)))
        assert (scores.chosen[row], scores.rejected[row]) == pytest.approx(rewards)
        # arXiv:2305.18290, section 4: beta sigmoid(-margin) times the difference of gradients.
        assert of_chosen[row] == pytest.approx(-0.3 * sigmoid(-margin))
        assert of_rejected[row] == pytest.approx(0.3 * sigmoid(-margin))


def test_smoothed_dpo_expects_some_pairs_the_wrong_way_round():
    chosen, rejected = sides()
    found = criteria.dpo(chosen, rejected, beta=0.3, label_smoothing=0.2).losses
    right = criteria.dpo(chosen, rejected, beta=0.3, label_smoothing=0).losses
    wrong = criteria.dpo(rejected, chosen, beta=0.3, label_smoothing=0).losses
    torch.testing.assert_close(found, 0.8 * right + 0.2 * wrong)


@pytest.mark.parametrize("length_normalized", [False, True])
def test_ipo_is_the_papers(length_normalized):
    chosen, rejected = sides()
    scores = criteria.ipo(chosen, rejected, beta=0.2, length_normalized=length_normalized)
    for row, ((w, m, w_ref), (x, n, x_ref)) in enumerate(numbers(chosen, rejected)):
        m, n = (m, n) if length_normalized else (1, 1)
        difference = (w - w_ref) / m - (x - x_ref) / n
        assert scores.losses[row].item() == pytest.approx((difference - 2.5) ** 2)
        assert scores.chosen[row].item() == pytest.approx(0.2 * (w - w_ref) / m)


def test_orpo_is_the_papers():
    chosen, rejected = sides()
    scores = criteria.orpo(chosen, rejected, beta=0.4)
    for row, ((w, m, _), (x, n, _)) in enumerate(numbers(chosen, rejected)):
        odds = [math.exp(mean) / (1 - math.exp(mean)) for mean in (w / m, x / n)]
        ratio = math.log(odds[0] / odds[1])
        assert scores.losses[row].item() == pytest.approx(-w / m - 0.4 * math.log(sigmoid(ratio)))


@pytest.mark.parametrize("mean", [-1e-12, -1e-3, -0.69, -0.70, -30.0])
def test_orpo_is_accurate_for_certain_and_for_hopeless_answers(mean):
    # One token, and a rejected answer whose odds are 1: the log odds of the chosen one are left.
    one = torch.ones(1)
    log_prob = torch.tensor([mean], dtype=torch.float32, requires_grad=True)
    even = Answers(torch.full((1,), -math.log(2)), one)
    loss = criteria.orpo(Answers(log_prob, one), even, beta=1.0).losses
    loss.sum().backward()
    log_odds = mean - math.log(-math.expm1(mean))
    assert loss.item() == pytest.approx(-mean + math.log1p(math.exp(-log_odds)), rel=1e-5)
    # d log odds / d log p = 1 / (1 - p)
    slope = -1 - sigmoid(-log_odds) / -math.expm1(mean)
    assert log_prob.grad.item() == pytest.approx(slope, rel=1e-4)


def test_orpo_of_a_certain_model_is_finite():
    one = torch.ones(1)
    log_prob = torch.zeros(1, requires_grad=True)
    even = Answers(torch.full((1,), -math.log(2)), one)
    loss = criteria.orpo(Answers(log_prob, one), even, beta=1.0).losses
    loss.sum().backward()
    assert loss.item() == pytest.approx(0, abs=1e-6)
    assert log_prob.grad.isfinite().all()


def test_simpo_is_the_papers():
    chosen, rejected = sides()
    scores = criteria.simpo(chosen, rejected, beta=2.0, gamma=1.2)
    for row, ((w, m, _), (x, n, _)) in enumerate(numbers(chosen, rejected)):
        margin = 2 * w / m - 2 * x / n - 1.2
        assert scores.losses[row].item() == pytest.approx(-math.log(sigmoid(margin)))


def test_kto_is_the_papers():
    answers, other = sides()
    is_desirable = torch.arange(PAIRS) % 3 == 0
    # The reference point is never negative: an estimate of few samples may be.
    ratios = other.log_ratios.detach()
    point = criteria.kto_reference_point(ratios.sum().abs(), torch.tensor(PAIRS))
    assert criteria.kto_reference_point(-ratios.sum().abs(), torch.tensor(PAIRS)) == 0
    assert point.item() == pytest.approx(abs(ratios.mean().item()))
    losses, rewards = criteria.kto(answers, is_desirable, point, 0.1, 1.3, 0.7)
    z = point.item()
    for row, ((y, _, y_ref), _) in enumerate(numbers(answers, other)):
        ratio = y - y_ref
        weight = 1.3 if is_desirable[row] else 0.7
        gain = ratio - z if is_desirable[row] else z - ratio
        assert losses[row].item() == pytest.approx(weight - weight * sigmoid(0.1 * gain))
        assert rewards[row].item() == pytest.approx(0.1 * ratio)
    (grad,) = torch.autograd.grad(losses.sum(), answers.log_probs)
    assert (grad < 0).tolist() == is_desirable.tolist()


def test_bradley_terry_is_the_log_probability_that_the_chosen_answer_wins():
    torch.manual_seed(1)
    rewards = torch.randn(2, PAIRS, dtype=torch.float64)
    scores = criteria.bradley_terry(*rewards)
    for loss, w, x in zip(scores.losses.tolist(), *rewards.tolist(), strict=True):
        assert loss == pytest.approx(-math.log(math.exp(w) / (math.exp(w) + math.exp(x))))


def test_far_apart_answers_have_finite_losses_and_gradients_in_fp32():
    low = torch.full((1,), -2000.0, requires_grad=True)
    chosen = Answers(low, torch.ones(1), torch.zeros(1))
    rejected = Answers(torch.zeros(1), torch.ones(1), torch.zeros(1))
    for scores in (
        criteria.dpo(chosen, rejected, 0.5, 0.1),
        criteria.simpo(chosen, rejected, 2.0, 1.0),
        criteria.orpo(chosen, rejected, 0.1),
    ):
        (grad,) = torch.autograd.grad(scores.losses.sum(), low)
        assert scores.losses.isfinite().all()
        assert grad.isfinite().all()
