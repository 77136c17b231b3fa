"""Trains a byte-level BPE tokenizer on documents."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import DataError, EnvironmentFault, RecipeError
from ..core.unfinished import Unfinished
from ..sources.configs import DocumentSource
from ..sources.documents import DocumentFault, text_of
from ..tokenizers.hf_tokenizer import HuggingFaceTokenizer, import_tokenizers
from ..tokenizers.patterns import find_pattern
from ..tokenizers.tokenizer_files import TokenizerFiles, byte_characters
from .tokenise import group_documents

NUM_BYTES = 256
# Merging the pairs of a piece takes time that grows with the square of its length. No published
# vocabulary has a token of more than a quarter of this.
LONGEST_PIECE = 1024
LAST_SECONDS = 2.0


@dataclass
class CorpusSize:
    """The size of the text that a tokenizer was trained on.

    Attributes:
        documents: the number of documents that hold text.
        bytes: the bytes of their text.
        skipped: the number of documents that could not be read.
    """

    documents: int = 0
    bytes: int = 0
    skipped: int = 0


def train_tokenizer(
    sources: Sequence[DocumentSource],
    out: Path,
    *,
    vocab_size: int,
    special_tokens: Sequence[str] = ("<|endoftext|>",),
    min_frequency: int = 2,
    pattern: str = "llama3",
    max_bytes: int = 0,
) -> tuple[HuggingFaceTokenizer, CorpusSize]:
    """Train a byte-level BPE and write it in Hugging Face's format, byte for byte reproducibly.

    Args:
        sources: the documents.
        out: the folder to create; nothing is left there after an error.
        vocab_size: the number of tokens: 256 bytes, the special tokens, and merged pairs.
        special_tokens: the special tokens, with ids from 0 on; the first ends a document.
        min_frequency: the smallest number of occurrences for which a pair is merged.
        pattern: the name of the regular expression that cuts text before pairs are counted.
        max_bytes: the largest number of bytes of text to read; 0 reads all documents.

    Returns:
        The tokenizer, and the size of the text that it was trained on.

    Raises:
        RecipeError: `out` exists, or the sizes do not fit.
        DataError: a document cannot be read, or the sources hold no text.
        EnvironmentFault: `tokenizers` is not installed, or `out` cannot be written.
    """
    _check(out, vocab_size, special_tokens)
    corpus = CorpusSize()
    texts = _read_texts(sources, max_bytes, corpus)
    content = _train(texts, vocab_size, special_tokens, min_frequency, find_pattern(pattern))
    if not corpus.documents:
        raise DataError(f"the sources hold no text ({corpus.skipped} documents skipped)")
    return _write(content, out, special_tokens[0]), corpus


def _check(out: Path, vocab_size: int, special_tokens: Sequence[str]) -> None:
    if not special_tokens or not all(special_tokens):
        raise RecipeError("a tokenizer needs special tokens, none of them empty")
    if len(set(special_tokens)) < len(special_tokens):
        raise RecipeError(f"a special token is given twice: {', '.join(special_tokens)}")
    fewest = NUM_BYTES + len(special_tokens)
    if vocab_size < fewest:
        raise RecipeError(
            f"a vocabulary of {vocab_size} has no room for {NUM_BYTES} bytes and "
            f"{len(special_tokens)} special tokens",
            f"give it {fewest} or more",
        )
    for token in special_tokens:
        if token in byte_characters() or not token.isprintable():  # the first stand for bytes
            raise RecipeError(
                f"special token {token!r}: expected more than one character, all printable",
                "give it a text that no document holds, such as <|endoftext|>",
            )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecipeError(f"{out}: is there already", "name a new folder")


def _read_texts(
    sources: Sequence[DocumentSource], max_bytes: int, corpus: CorpusSize
) -> Iterator[str]:
    """Yield the texts of the sources up to `max_bytes`, and count them in `corpus`."""
    pairs = ((document, source.on_error) for source in sources for document in source.documents())
    for document, on_error in pairs:
        if isinstance(document, DocumentFault):
            if on_error == "stop":
                raise DataError(f"{document.place}: {document.reason}", "repair it")
            corpus.skipped += 1
        elif text := text_of(document):
            size = len(text.encode())
            if max_bytes and corpus.bytes + size > max_bytes:
                return
            corpus.documents += 1
            corpus.bytes += size
            yield text


def _train(
    texts: Iterable[str],
    vocab_size: int,
    special_tokens: Sequence[str],
    min_frequency: int,
    pattern: str,
) -> str:
    """Return the content of `tokenizer.json`."""
    import_tokenizers()
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    def cut_by(expression: str) -> pre_tokenizers.Sequence:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(expression), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    native = Tokenizer(models.BPE())
    # Bound every repetition to LONGEST_PIECE. In our patterns `*` and `+` are always quantifiers,
    # never literal characters, so replacing the text is safe.
    at_most = pattern.replace("+", f"{{1,{LONGEST_PIECE}}}")
    native.pre_tokenizer = cut_by(at_most.replace("*", f"{{0,{LONGEST_PIECE}}}"))
    native.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    run_interruptibly(
        group_documents(texts), lambda read: native.train_from_iterator(read, trainer)
    )
    # The file gets the published pattern: the bounds only matter for the speed of training.
    native.pre_tokenizer = cut_by(pattern)
    return str(native.to_str(pretty=True))


def run_interruptibly(items: Iterable[Any], read: Callable[[Iterator[Any]], object]) -> None:
    """Run a native function in another thread, so that this thread can handle signals.

    Args:
        items: the input; after a signal handler raises, no further item is given out.
        read: the native function, which reads the items.

    Raises:
        BaseException: the error of the function or of a signal handler.
    """
    failures: list[BaseException] = []
    interrupted = threading.Event()

    def run() -> None:
        try:
            read(itertools.takewhile(lambda _: not interrupted.is_set(), items))
        except BaseException as error:
            failures.append(error)

    # A daemon thread, so that the interpreter can exit while native code still runs.
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        while thread.is_alive():
            thread.join(0.1)
    except BaseException:
        interrupted.set()
        # The thread gets no more items; once it has noticed, it runs only native code.
        thread.join(LAST_SECONDS)
        raise
    if failures:
        raise failures[0]


def _write(content: str, out: Path, eos_token: str) -> HuggingFaceTokenizer:
    files = TokenizerFiles(str(out), content.encode(), {"eos_token": eos_token})
    tokenizer = HuggingFaceTokenizer(files, eos_token)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if out.exists():  # an empty folder
            out.rmdir()
        unfinished = Unfinished(out)
        try:
            unfinished.path.mkdir()
            tokenizer.save(unfinished.path)
            unfinished.publish()
        finally:
            unfinished.discard()
    except OSError as error:
        raise EnvironmentFault(f"{out}: cannot be written: {error.strerror}") from error
    return tokenizer
