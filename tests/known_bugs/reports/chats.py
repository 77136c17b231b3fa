"""Conversations: which tokens of them are learned."""

from datetime import date
from types import SimpleNamespace

import numpy as np

from tests.known_bugs.catalogue import known_bug
from tests.sources.chats import QWEN, TALK
from trainer.engine.corpus import tokenise
from trainer.engine.data import packing
from trainer.engine.data.batch import IGNORED
from trainer.engine.data.packing import PaddedRows
from trainer.engine.sources.chat_renderer import CHATML
from trainer.engine.sources.chat_sandbox import Renderer
from trainer.engine.tokenizers.byte_tokenizer import ByteTokenizer
from trainer.engine.tokenizers.tokenizer import MaskedDocument

SHORT_TALK = [
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "2."},
    {"role": "user", "content": "And?"},
    {"role": "assistant", "content": "3."},
]


def learned_text(template, talk):
    """Return the text of the labels that count in a conversation, end of document as |."""
    tokenizer = ByteTokenizer()
    renderer = Renderer(template, {"eos_token": ""}, date(2024, 7, 26))
    text, ranges = renderer.render_masked(talk, None)
    (chunk,) = tokenise.tokenise([MaskedDocument(text, tuple(ranges))], "stop", tokenizer)
    store = SimpleNamespace(
        tokens=chunk.tokens,
        offsets=np.array([0, len(chunk.tokens)]),
        loss_mask=chunk.loss_mask,
        eos_id=tokenizer.eos_id,
    )
    rows = PaddedRows(store, 0, len(chunk.tokens), 512).gather(np.arange(1))
    labels = rows.labels[rows.labels != IGNORED].tolist()
    return "".join("|" if each == tokenizer.eos_id else chr(each) for each in labels)


def take_the_mask_of_inputs(patch):
    original = packing._inputs_and_labels

    def inputs_and_labels(windows, counted):
        if counted is not None:
            counted = np.roll(counted, 1, axis=1)
        return original(windows, counted)

    patch.setattr(packing, "_inputs_and_labels", inputs_and_labels)


@known_bug(
    "pytorch/torchtitan#2755",
    "The mask of a conversation was applied to labels that had been shifted, and the first token"
    " of each answer was not learned.",
    take_the_mask_of_inputs,
)
def the_first_token_of_an_answer_is_learned():
    assert learned_text(CHATML, SHORT_TALK) == "2.<|im_end|>\n3.<|im_end|>\n|"


def learn_all_without_marks(patch):
    patch.setattr(Renderer, "_find_answers", lambda self, talk, tools, text: [(0, len(text))])


@known_bug(
    "NVIDIA-NeMo/Megatron-Bridge#3359",
    "Where a chat template did not mark the assistant's turns, the whole conversation was learned"
    " without a word.",
    learn_all_without_marks,
)
def answers_are_found_without_marks_in_the_template():
    assert learned_text(QWEN, SHORT_TALK) == "2.<|im_end|>\n3.<|im_end|>\n|"


def leave_out_the_beginning_of_the_turn(patch):
    original = Renderer.render

    def render(self, messages, tools, *, prompt=False):
        return original(self, messages, tools)

    patch.setattr(Renderer, "render", render)


@known_bug(
    "huggingface/trl#4147",
    "The prompt was rendered without the beginning of the assistant's turn, which was then"
    " learned with the answer.",
    leave_out_the_beginning_of_the_turn,
)
def the_beginning_of_an_assistant_turn_is_not_learned():
    assert "assistant" not in learned_text(QWEN, SHORT_TALK)
    assert learned_text(QWEN, TALK).count("<|im_end|>") == 2
