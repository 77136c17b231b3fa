"""Rows of tokens: packing, masks of the loss, conversations, and random numbers by sample."""

from itertools import pairwise

import numpy as np
import torch
import torch.nn.functional as F

from tests.corpus.stores import store_of
from tests.known_bugs.catalogue import known_bug
from tests.known_bugs.ranks import alone, on_ranks
from tests.known_bugs.reports.context_ranks import WINDOWS
from tests.known_bugs.runs import assembled, assert_equal, data_of, enlarge, first_step
from trainer.engine.corpus import tokenise
from trainer.engine.data import collate, packing
from trainer.engine.data.batch import IGNORED
from trainer.engine.data.packing import ConcatRows, DocumentRows, PaddedRows
from trainer.engine.parallel import blocks
from trainer.engine.parallel.tables import Memory
from trainer.engine.tasks.classification.task import TextTask
from trainer.engine.tasks.language_modeling.next_token import NextToken
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer
from trainer.model_zoo.layers.attention import GroupedQueryAttention
from trainer.model_zoo.layers.dropout import drop

LENGTHS = [5, 9, 3, 7, 4]


def rows_of(kind, seq_len=12):
    """Return a store of short documents, and its rows of a kind."""
    store = store_of(LENGTHS)
    packed = kind(store, 0, store.num_tokens, seq_len)
    return store, packed.gather(np.arange(packed.num_rows))


def learned_pairs(rows):
    """Return each token with the label that it learns."""
    learned = rows.labels != IGNORED
    return sorted(zip(rows.tokens[learned].tolist(), rows.labels[learned].tolist(), strict=True))


def pairs_within_documents(store):
    documents = [store.tokens[a:b].tolist() for a, b in pairwise(store.offsets)]
    return sorted(pair for document in documents for pair in pairwise(document))


def cross_the_borders(patch):
    original = DocumentRows.gather

    def gather(self, rows):
        found = original(self, rows)
        following = np.roll(found.tokens, -1, axis=1)
        ends = np.diff(found.document_ids, axis=1, append=-1) != 0
        labels = np.where(ends & ~found.padding_mask, following, found.labels)
        return found._replace(labels=labels)

    patch.setattr(DocumentRows, "gather", gather)


@known_bug(
    "pytorch/torchtitan#4075",
    "The last token of a packed document learned to predict the first token of the next.",
    cross_the_borders,
)
def labels_stay_inside_documents():
    store, rows = rows_of(DocumentRows)
    assert learned_pairs(rows) == pairs_within_documents(store)


def leave_labels_in_place(patch):
    original = packing._inputs_and_labels

    def inputs_and_labels(windows, counted):
        columns = original(windows, counted)
        columns[1] = windows[:, :-1]
        return columns

    patch.setattr(packing, "_inputs_and_labels", inputs_and_labels)


@known_bug(
    "KempnerInstitute/KempnerForge#155",
    "Labels were not shifted, and a model learned to copy its input.",
    leave_labels_in_place,
)
def each_token_learns_the_one_that_follows():
    store, rows = rows_of(ConcatRows)
    stream = store.tokens.tolist()
    assert learned_pairs(rows) == sorted(pairwise(stream[: rows.tokens.size + 1]))


def number_the_whole_row(patch):
    original = DocumentRows.gather

    def gather(self, rows):
        found = original(self, rows)
        positions = np.tile(np.arange(self.seq_len), (len(rows), 1))
        return found._replace(positions=positions)

    patch.setattr(DocumentRows, "gather", gather)


@known_bug(
    "hiyouga/LlamaFactory#7318",
    "Packed samples were kept apart in attention, but their positions ran on through the row.",
    number_the_whole_row,
)
def positions_begin_anew_in_each_packed_document():
    _, rows = rows_of(DocumentRows)
    for ids, positions in zip(rows.document_ids, rows.positions, strict=True):
        for number in set(ids.tolist()):
            own = positions[ids == number]
            assert own.tolist() == list(range(len(own)))


def packed_and_apart():
    """Return the loss of packed documents, and torch's of each document alone."""
    parts = assembled(data={"packing": "documents", "micro_batch": 4})
    (batch,) = next(parts.loader.steps(0))
    assert batch.document_ids.max() > 0, "rows hold several documents"
    losses, count = 0.0, 0
    for tokens, labels, ids in zip(batch.tokens, batch.labels, batch.document_ids, strict=True):
        for number in range(int(ids.max()) + 1):
            own = ids == number
            logits = parts.model(tokens[own].unsqueeze(0)).squeeze(0)
            kept = labels[own] != IGNORED
            losses += F.cross_entropy(logits[kept], labels[own][kept], reduction="sum").item()
            count += int(kept.sum())
    return parts.step.accumulate([batch]).loss, losses / count


def attend_to_all(patch):
    original = NextToken.arguments

    def arguments(self, batch):
        return {**original(self, batch), "document_ids": None}

    patch.setattr(NextToken, "arguments", arguments)


@known_bug(
    "axolotl-ai-cloud/axolotl#3796",
    "With some attention kernels the mask that keeps packed samples apart was not applied.",
    attend_to_all,
)
def packed_documents_do_not_attend_to_each_other():
    packed, apart = packed_and_apart()
    assert_equal(packed, apart)


def take_ends_for_filler(patch):
    original = PaddedRows.gather

    def gather(self, rows):
        found = original(self, rows)
        found.labels[found.labels == self.store.eos_id] = IGNORED
        return found

    patch.setattr(PaddedRows, "gather", gather)


@known_bug(
    "huggingface/open-r1#494",
    "The token that ends a document was also the filler, and labels equal to it were left out:"
    " models never learned to stop.",
    take_ends_for_filler,
)
def the_end_of_a_document_is_learned_though_filler_has_its_token():
    store, rows = rows_of(PaddedRows)
    assert (rows.labels == store.eos_id).sum() == len(LENGTHS)
    assert learned_pairs(rows) == pairs_within_documents(store)


def append_nothing(patch):
    original = tokenise.make_chunk

    def make_chunk(tokenizer, documents, loss_masks=None, tally=None):
        chunk = original(tokenizer, documents, loss_masks, tally)
        is_end = chunk.tokens == tokenizer.eos_id
        return chunk._replace(tokens=chunk.tokens[~is_end], lengths=chunk.lengths - 1)

    patch.setattr(tokenise, "make_chunk", make_chunk)


@known_bug(
    "huggingface/trl#1623",
    "Texts were tokenised without a token for their end, and finetuned models did not stop.",
    append_nothing,
)
def every_document_ends_with_its_token():
    tokenizer = ByteTokenizer()
    (chunk,) = tokenise.tokenise(["ab", "cde"], "stop", tokenizer)
    ends = np.cumsum(chunk.lengths) - 1
    assert chunk.lengths.tolist() == [3, 4]
    assert (chunk.tokens[ends] == tokenizer.eos_id).all()


def draw_the_same_keys(patch):
    patch.setattr(collate, "make_keys", lambda samples, seed: np.full(len(samples), seed))


@known_bug(
    "huggingface/transformers#31412",
    "All processes had the same seed and dropped the same hidden states of their different"
    " samples.",
    draw_the_same_keys,
)
def samples_lose_different_hidden_states():
    keys = torch.from_numpy(collate.make_keys(np.arange(16), 3)).unsqueeze(1)
    kept = drop(torch.ones(16, 1, 64), 0.5, keys).squeeze(1) != 0
    assert len({tuple(row.tolist()) for row in kept}) == 16
    assert 0.4 < kept.float().mean() < 0.6


def draw_on_each_rank(patch):
    original = TextTask.arguments

    def arguments(self, batch):
        torch.manual_seed(torch.distributed.get_rank() if torch.distributed.is_initialized() else 9)
        return {**original(self, batch), "dropout_keys": None}

    patch.setattr(TextTask, "arguments", arguments)


DROPPING = {"name": "sequence_classification", "labels": ["no", "yes"], "dropout": 0.5}


@known_bug(
    "tenstorrent/tt-metal#55947",
    "One switch seeded dropout for all devices or for each, while tensor ranks of the same"
    " samples need the same masks and data ranks others.",
    draw_on_each_rank,
    world=2,
)
def ranks_that_share_samples_drop_the_same_hidden_states():
    rows = [{"text": "ab" * (1 + n % 5), "label": "yes" if n % 3 else "no"} for n in range(12)]
    changes = {"task": DROPPING, "data": data_of("dropping", rows)}
    expected = alone(first_step, changes)
    for parallel in ({"tensor": 2, "shard": 1}, {"replicate": 2, "shard": 1}):
        for found in on_ranks(2, first_step, {**changes, "parallel": parallel}):
            assert_equal(found["loss"], expected["loss"], "loss")
            assert_equal(found["norm"], expected["norm"], "norm")


def draw_anew(patch):
    original = blocks.checkpoint

    def checkpoint(*args, **options):
        return original(*args, **options, preserve_rng_state=False)

    patch.setattr(blocks, "checkpoint", checkpoint)


@known_bug(
    "allenai/OLMo-core#828",
    "Blocks were recomputed without the random numbers of their forward pass, and gradients were"
    " those of another dropout than the loss.",
    draw_anew,
)
def recomputed_blocks_drop_what_their_forward_pass_dropped():
    block = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Tanh())
    blocks.recompute(block, 0, Memory(recompute="full"), None)
    x = torch.rand(64, requires_grad=True)
    out = block(x)
    out.sum().backward()
    assert ((x.grad != 0) == (out != 0)).all()


def give_attention_no_window(patch):
    original = GroupedQueryAttention.__init__

    def init(self, *args, window=None, **options):
        original(self, *args, **options)

    patch.setattr(GroupedQueryAttention, "__init__", init)


@known_bug(
    "unslothai/unsloth#8253",
    "The window of a model did not reach one of the attention kernels, which saw all of each row.",
    give_attention_no_window,
)
def tokens_see_no_farther_than_their_windows():
    model = {**WINDOWS, "full_every": 3}  # neither of the two blocks sees a whole row
    parts = assembled(model=model)
    enlarge(parts.model)
    tokens = torch.arange(16).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 0] = 99
    with torch.no_grad():
        difference = (parts.model(tokens) - parts.model(changed)).abs().amax(-1)[0]
    # Each of two blocks looks two positions back.
    assert (difference > 0).tolist() == [place <= 4 for place in range(16)]
