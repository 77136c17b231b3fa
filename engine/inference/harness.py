"""Runs the tasks of lm-evaluation-harness on our model.

Importing this module imports `lm_eval`. The interface is `lm_eval.api.model.LM`. Texts that are too
long are truncated as the harness's own model for transformers (`HFLM`) does.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.models.utils import Collator, normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from ..core.errors import EnvironmentFault, RecipeError, TrainerError, nearest
from ..data.batch import IGNORED
from ..tokenizers.byte_tokenizer import context_id
from .generate import continue_rows, sampling_probabilities
from .open import OpenedModel
from .score import ScoredWindow, score_windows, windows


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """Implements the harness's model interface for one of our models.

    Args:
        opened: the model.
        seq_len: the largest number of input tokens; longer inputs are truncated at the left.
        batch_size: rows of a forward pass.
    """

    def __init__(self, opened: OpenedModel, seq_len: int, batch_size: int) -> None:
        super().__init__()
        self.max_length = seq_len
        self.max_gen_toks = 256
        self.batch_size = batch_size
        self._opened = opened
        self._device = next(opened.model.parameters()).device

    @property
    def eot_token_id(self) -> int:
        """The id of the token that precedes a text without context."""
        return context_id(self._opened.tokenizer)

    @property
    def tokenizer_name(self) -> str:
        """The key under which the harness caches requests."""
        return self._opened.tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        """Return the ids of a text; no special token is added."""
        ids: list[int] = self._opened.tokenizer.encode(string).tolist()
        return ids

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Return the log-probability of each whole text, after the token that begins a text."""
        texts = [request.args[0] for request in requests]
        rows = (
            row
            for number, text in enumerate(texts)
            for row in windows(
                np.array([self.eot_token_id, *self.tok_encode(text)]),
                self.max_length,
                self.max_length,
                document=number,
            )
        )
        sums = [0.0] * len(texts)
        for row, score in self._score(rows):
            sums[row.document] -= score.nll
        for text, total in zip(texts, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return sums

    def _loglikelihood_tokens(self, requests: Any, **options: Any) -> list[tuple[float, bool]]:
        answers = [(0.0, True)] * len(requests)
        rows = (
            self._pair(number, context, continuation)
            for number, (_, context, continuation) in enumerate(requests)
        )
        for row, score in self._score(rows):
            answers[row.document] = (-score.nll, score.is_greedy)
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _pair(self, number: int, context: list[int], continuation: list[int]) -> ScoredWindow:
        """Return a row whose labels are the continuation; a context that is too long is truncated.

        Args:
            number: the index of the request.
            context: token ids that are not scored.
            continuation: token ids that are scored.
        """
        if len(continuation) > self.max_length:
            raise RecipeError(
                f"a continuation of {len(continuation)} tokens; rows have {self.max_length}",
                "raise --seq-len",
            )
        tokens = np.array([*context, *continuation])[-(self.max_length + 1) :]
        labels = tokens[1:].copy()
        labels[: len(labels) - len(continuation)] = IGNORED
        return ScoredWindow(tokens[:-1], labels, number)

    def _score(self, rows: Any) -> Any:
        return score_windows(self._opened.model, rows, self.batch_size)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        """Return the text generated after each context, up to one of the request's stop strings."""
        contexts = Collator(
            [(*request.args, self.tok_encode(request.args[0])) for request in requests],
            sort_fn=lambda request: -len(request[2]),
            group_by="gen_kwargs",
            group_fn=lambda request: request[1],
        )
        texts: list[str] = []
        for batch in contexts.get_batched(n=self.batch_size):
            wanted = _Wanted.of(batch[0][1], self.max_gen_toks)
            texts += self._generate([ids for _, _, ids in batch], wanted)
            for (context, settings, _), text in zip(batch, texts[-len(batch) :], strict=True):
                self.cache_hook.add_partial("generate_until", (context, settings), text)
        answers: list[str] = contexts.get_original(texts)
        return answers

    def _generate(self, prompts: list[list[int]], wanted: _Wanted) -> list[str]:
        room = self.max_length - wanted.max_new_tokens
        if room < 1:
            raise RecipeError(
                f"a task asks for {wanted.max_new_tokens} new tokens; prompt and answer together "
                f"have {self.max_length}",
                "raise --seq-len",
            )
        generators = [torch.Generator().manual_seed(number) for number in range(len(prompts))]
        return continue_rows(
            self._opened.model,
            self._opened.tokenizer,
            [prompt[-room:] for prompt in prompts],
            generators,
            wanted.probabilities,
            wanted.max_new_tokens,
            wanted.until,
        )


class _Wanted(NamedTuple):
    """The generation settings of a task."""

    max_new_tokens: int
    until: list[str]
    temperature: float
    top_k: int
    top_p: float

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the probabilities to sample from, [B, V]."""
        return sampling_probabilities(logits, self.temperature, self.top_k, self.top_p)

    @staticmethod
    def of(settings: dict[str, Any], default_tokens: int) -> _Wanted:
        """Read a task's `generation_kwargs`; without `do_sample` the likeliest token is taken."""
        given: dict[str, Any] = dict(normalize_gen_kwargs(settings, default_tokens))
        samples = bool(given.get("do_sample"))
        return _Wanted(
            given["max_gen_toks"],
            [word for word in given["until"] if word],
            float(given.get("temperature") or 1.0) if samples else 0.0,
            int(given.get("top_k") or 0),
            float(given.get("top_p") or 1.0),
        )


def run_tasks(
    opened: OpenedModel,
    names: Sequence[str],
    *,
    include_path: Path | None,
    num_fewshot: int | None,
    seq_len: int,
    batch_size: int,
    limit: int,
) -> dict[str, Any]:
    """Run tasks, groups or tags of the harness and return the harness's results by task.

    Args:
        opened: the model.
        names: names of tasks, groups or tags of the harness or in `include_path`.
        include_path: a folder with further tasks. They may name Python code, which is executed.
        num_fewshot: examples before each question; None takes each task's own number.
        seq_len: the largest number of input tokens.
        batch_size: rows of a forward pass.
        limit: the number of examples of each task; 0 is all.

    Raises:
        RecipeError: a task does not exist or is faulty.
        EnvironmentFault: the data of a task cannot be read or downloaded.
    """
    manager = _manager(names, include_path)
    try:
        found = simple_evaluate(
            model=HarnessModel(opened, seq_len, batch_size),
            tasks=list(names),
            num_fewshot=num_fewshot,
            limit=limit or None,
            task_manager=manager,
            bootstrap_iters=1000,
            log_samples=False,
        )
    except OSError as error:  # of the datasets library too, when it finds no data
        raise EnvironmentFault(f"a task's data cannot be read: {error}") from error
    except TrainerError:
        raise
    except Exception as error:  # whatever a faulty template, metric or column leads to
        message = f"the tasks cannot be run: {type(error).__name__}: {error}"
        raise RecipeError(message, "check their files; --traceback shows where") from error
    assert found is not None, "only ranks other than 0 get nothing"
    results: dict[str, Any] = found["results"]
    return results


def _manager(names: Sequence[str], include_path: Path | None) -> TaskManager:
    """Return the task manager; the harness's own tasks are indexed only if one of them is named."""
    if not names:
        raise RecipeError("--tasks names no task")
    if include_path is not None:
        if not include_path.is_dir():
            raise RecipeError(f"--include-path {include_path}: no such folder")
        own = TaskManager(include_path=str(include_path), include_defaults=False)
        if set(names) <= set(own.all_tasks):
            return own
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise RecipeError(
            f"no task is named {', '.join(unknown)}", nearest(unknown[0], manager.all_tasks)
        )
    return manager
