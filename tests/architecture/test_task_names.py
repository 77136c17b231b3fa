"""The step, the loop, saving, pipelines and estimates know tasks; what is of tokens is listed."""

import ast
import re

from tests.architecture.sources import modules, name, tree

PLACES = (
    "engine/train/loop.py",
    "engine/train/saving.py",
    "engine/train/step.py",
    "engine/train/update.py",
    "engine/parallel/pipeline/",
    "engine/estimate/",
)
OF_TOKENS = re.compile(
    r"(^|_)(tokens?|vocab|vocabulary|seq_len|logits?|languages?|documents?)(_|$)"
)
ALLOWED = {
    "experts_per_token": "a key of a model with experts",
    "groups_per_token": "a key of a model with experts",
    "flops_per_token": "a method of every model's config",
    "with_vocab": "a method of every model's config",
    "vocab_size": "what models with an embedding are built with: the tokenizer's size",
    "needs_language_model": "an attribute of tasks, which asks for what is of tokens",
    "engine/estimate/speed.py: tokens_per_second": "a key of what `trainer plan --json` prints",
    "engine/estimate/memory.py: seq_len": "said of ragged rows of a language model alone",
    "engine/estimate/search.py: seq_len": "the search is for language models",
    "engine/estimate/step_sizes.py: seq_len": "formulas of language models",
    "engine/estimate/plan.py: seq_len": "what `flops_per_token` takes",
    "engine/estimate/roofline.py: vocab": "formulas of language models",
    "engine/estimate/roofline.py: logits": "formulas of language models",
}
"""names, everywhere or in one file, and why they are right there"""


def names(path):
    """Yield what a module calls its attributes, arguments, variables, functions and fields."""
    for node in ast.walk(tree(path)):
        match node:
            case ast.Attribute(attr=word) | ast.arg(arg=word) | ast.keyword(arg=str(word)):
                yield word
            case ast.Name(id=word) | ast.FunctionDef(name=word) | ast.ClassDef(name=word):
                yield word
            case ast.Constant(value=str(word)):
                yield word  # a key of a dict; texts have spaces


def found():
    """Return the names of tokens by the entries of `ALLOWED` that they need."""
    return {
        word if word in ALLOWED else f"{name(path)}: {word}"
        for path in modules("engine")
        if name(path).startswith(PLACES)
        for word in names(path)
        if OF_TOKENS.search(word) and word.isidentifier()
    }


def test_what_trains_any_task_has_no_names_of_tokens():
    assert found() - ALLOWED.keys() == set()


def test_every_exception_is_needed():
    assert ALLOWED.keys() - found() == set()
