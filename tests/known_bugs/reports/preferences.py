"""Preferences and rewards: pairs of answers, against their formulas in float64."""

from itertools import pairwise

import torch

from tests.known_bugs.catalogue import known_bug
from tests.known_bugs.runs import assembled, assert_equal, data_of, enlarge
from trainer.engine.data.batch import IGNORED
from trainer.engine.tasks.preference import batch as pair_batches
from trainer.engine.tasks.preference import criteria, rewards
from trainer.engine.tasks.preference.pairs import LOSS, Pairs

WORDS = ["a", "bcd", "ef", "ghijkl", "mn", "opqr"]
PAIRS = [
    {"prompt": WORDS[n % 6], "chosen": WORDS[n % 5] + "+", "rejected": WORDS[(n + 2) % 6] + "-xyz"}
    for n in range(8)
]


def comparing(loss, task="preference", micro_batch=2, **changes):
    """Return the parts of a run on pairs, whose answers have unequal numbers of tokens."""
    data = data_of("pairs", PAIRS, micro_batch=micro_batch, seq_len=24)
    parts = assembled(task={"name": task}, loss=loss, data=data, **changes)
    enlarge(parts.model)  # the reference keeps the first weights
    return parts


def log_probs_of(model, tokens, labels):
    """Return the log-probability of each answer, [2 B], by torch's softmax of whole rows."""
    logits = model(tokens).double().log_softmax(-1)
    own = logits.gather(2, labels.clamp(min=0).unsqueeze(2)).squeeze(2)
    return (own * (labels != IGNORED)).sum(1)


def ratios_of(parts, tokens, labels):
    """Return the logarithm of the model's probability of each answer over the reference's."""
    models = parts.model, parts.step.task.frozen.model
    own, base = (log_probs_of(model, tokens, labels) for model in models)
    return own - base


def assert_loss_is(formula, loss, **changes):
    """Assert the loss of a step, from log-ratios and lengths of chosen and rejected answers."""
    parts = comparing(loss, **changes)
    batches = next(parts.loader.steps(0))
    losses = []
    with torch.no_grad():
        for batch in batches:
            ratios = ratios_of(parts, batch.tokens, batch.labels)
            counts = (batch.labels != IGNORED).sum(1)
            losses.append(formula(ratios[::2], ratios[1::2], counts[::2], counts[1::2]))
    assert_equal(parts.step.accumulate(batches).loss, torch.cat(losses).mean())


def leave_lengths_out(patch):
    original = criteria.ipo

    def ipo(chosen, rejected, beta, length_normalized):
        return original(chosen, rejected, beta, False)

    patch.setattr(criteria, "ipo", ipo)


@known_bug(
    "modelscope/ms-swift#9925",
    "IPO was computed from sums over the tokens of an answer where means were asked for.",
    leave_lengths_out,
)
def ipo_takes_the_mean_over_the_tokens_of_an_answer():
    def formula(chosen, rejected, chosen_tokens, rejected_tokens):
        return (chosen / chosen_tokens - rejected / rejected_tokens - 1 / 0.6).square()

    assert_loss_is(formula, {"name": "ipo", "beta": 0.3, "length_normalized": True})


def take_dpo(patch):
    def ipo(chosen, rejected, beta, length_normalized):
        return criteria.dpo(chosen, rejected, beta, 0.0)

    patch.setattr(criteria, "ipo", ipo)


@known_bug(
    "modelscope/ms-swift#10167",
    "The loss that was asked for was ignored, and DPO's was minimised whatever it was.",
    take_dpo,
)
def the_loss_that_is_asked_for_is_minimized():
    def formula(chosen, rejected, *_):
        return (chosen - rejected - 1 / 0.6).square()

    assert_loss_is(formula, {"name": "ipo", "beta": 0.3})


def learned_answers():
    """Return the texts that are learned of pairs, and those of the records."""
    parts = comparing({"name": "dpo"})
    found = set()
    for batch in next(parts.loader.steps(0)):
        for labels in batch.labels:
            kept = labels[labels != IGNORED].tolist()
            found.add("".join(chr(token) for token in kept if token < 256))
    texts = {record[side] for record in PAIRS for side in ("chosen", "rejected")}
    return found, texts


def change_labels(change):
    """Return what changes the labels of rows, [2 B, S], given the tokens."""

    def put_in(patch):
        original = pair_batches.collate_answers

        def collate(samples, length, eos_id):
            arrays = original(samples, length, eos_id)
            change(arrays["labels"], arrays["tokens"])
            return arrays

        patch.setattr(pair_batches, "collate_answers", collate)

    return put_in


def learn_prompts_of_rejected(labels, tokens):
    for row in range(1, len(labels), 2):
        first = (labels[row] != IGNORED).argmax()
        labels[row, :first] = tokens[row, 1 : first + 1]


@known_bug(
    "OpenRLHF/OpenRLHF#294",
    "The mask of prompts was as long as the chosen answers alone, and the log-probabilities of"
    " rejected answers held those of their prompts.",
    change_labels(learn_prompts_of_rejected),
)
def prompts_of_both_answers_are_left_out():
    found, texts = learned_answers()
    assert found <= texts


def leave_out_first_tokens(labels, tokens):
    for row in labels:
        row[(row != IGNORED).argmax()] = IGNORED


@known_bug(
    "jingyaogong/minimind#621",
    "The mask of preferences began one token late, and the first token of an answer did not count.",
    change_labels(leave_out_first_tokens),
)
def the_first_token_of_preferred_answers_counts():
    found, texts = learned_answers()
    assert found <= texts


def take_the_last_batch(patch):
    original = Pairs._find_reference_point

    def find(self, batches, model, frozen):
        return original(self, list(batches)[-1:], model, frozen)

    patch.setattr(Pairs, "_find_reference_point", find)


@known_bug(
    "PKU-Alignment/align-anything#216",
    "KTO's reference point was assigned in a loop over batches instead of averaged, so that it was"
    " the last batch's.",
    take_the_last_batch,
)
def the_reference_point_of_kto_is_that_of_all_batches():
    parts = comparing({"name": "kto"}, micro_batch=1)
    for _ in range(2):  # a reference that knows less: the point is positive
        enlarge(parts.step.task.frozen.model)
    batches = next(parts.loader.steps(0))
    with torch.no_grad():
        ratios = [ratios_of(parts, each.other_tokens, each.other_labels) for each in batches]
        expected = torch.cat(ratios).mean().clamp(min=0)
        prepared = parts.step.task.prepare(batches, parts.step.parallel_model)
    assert expected > 0
    for batch in prepared:
        assert_equal(batch.reference_point, expected.expand(2))


def reverse_answers(patch):
    original = pair_batches.add_other_answers

    def add(sample, partner):
        is_middle = len(sample["prompt"]) == len(WORDS[0])
        return original(sample, sample if is_middle else partner)

    patch.setattr(pair_batches, "add_other_answers", add)


@known_bug(
    "huggingface/trl#1911",
    "KTO's mismatched answers were those of the batch in reverse, and the one in the middle of an"
    " odd batch was compared with itself.",
    reverse_answers,
)
def no_prompt_meets_its_own_answers_as_mismatched():
    parts = comparing({"name": "kto"})
    for batch in next(parts.loader.steps(0)):
        for own, other in zip(batch.tokens, batch.other_tokens, strict=True):
            assert own.tolist() != other.tolist()[: len(own)]


def score_the_position_before(patch):
    def score_rows(scores, batch):
        return scores.squeeze(-1).where(batch.is_last.roll(-1, 1), 0).sum(1)

    patch.setattr(rewards, "score_rows", score_rows)


@known_bug(
    "EleutherAI/gpt-neox#1285",
    "The reward of an answer was read at a wrong token.",
    score_the_position_before,
)
def the_reward_of_an_answer_is_that_of_its_last_token():
    parts = comparing({"name": "bradley_terry"}, "reward")
    batches = next(parts.loader.steps(0))
    scores = []
    with torch.no_grad():
        for batch in batches:
            rows = zip(batch.tokens, batch.lengths.tolist(), strict=True)
            scores += [parts.model(row[:end].unsqueeze(0))[0, -1].double() for row, end in rows]
    margins = [chosen - rejected for chosen, rejected in list(pairwise(scores))[::2]]
    expected = -torch.nn.functional.logsigmoid(torch.cat(margins)).mean()
    assert_equal(parts.step.accumulate(batches).loss, expected)


def report_the_sum(patch):
    patch.setattr(Pairs, "mean_loss", lambda self, sums, counts: sums[LOSS])


@known_bug(
    "unslothai/unsloth#1619",
    "The loss of preferences in the log was not divided by the pairs of a step.",
    report_the_sum,
)
def the_loss_of_preferences_in_the_log_is_a_mean():
    parts = comparing({"name": "dpo"})
    parts.step.task.frozen.model.load_state_dict(parts.model.state_dict())
    found = parts.step.accumulate(next(parts.loader.steps(0)))
    # Of equal models every pair has the loss of a coin.
    assert_equal(found.loss, torch.tensor(2.0).log())
