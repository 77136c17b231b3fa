"""Runs the tasks of lm-evaluation-harness on our model.

Importing this module imports `lm_eval`. The interface is `lm_eval.api.model.LM`. Texts that are too
long are truncated as the harness's own model for transformers (`HFLM`) does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import Collator, normalize_gen_kwargs
from lm_eval.tasks import TaskManager

from ..checkpoint.state import random_state, restore_random_state, seed_everything
from ..core.errors import EnvironmentFault, RecipeError, TrainerError, nearest
from ..data.batch import IGNORED
from ..tokenizers.byte_tokenizer import context_id
from ..tokenizers.tokenizer import Tokenizer
from .generate import continue_rows, sampling_probabilities
from .score import ScoredWindow, TextScorer, gather_objects, windows

FEWSHOT_SEED = 1234
"""what the harness draws the examples before a question with, unless it is told otherwise"""
LENGTH_HINT = "longer rows are needed: --seq-len, or data.seq_len of a run"


class HarnessModel(TemplateLM):  # type: ignore[misc]
    """Implements the harness's model interface for one of our models.

    On several ranks all have the same requests and get the same answers.

    Args:
        scorer: the model.
        tokenizer: the tokenizer of the model.
        seq_len: the largest number of input tokens; longer inputs are truncated at the left.
        batch_size: rows of a forward pass.
    """

    def __init__(
        self, scorer: TextScorer, tokenizer: Tokenizer, seq_len: int, batch_size: int
    ) -> None:
        super().__init__()
        self.max_length = seq_len
        self.max_gen_toks = 256
        self.batch_size = batch_size
        self.scorer = scorer
        self._tokenizer = tokenizer
        self._device = scorer.plan.device

    @property
    def eot_token_id(self) -> int:
        """The id of the token that precedes a text without context."""
        return context_id(self._tokenizer)

    @property
    def tokenizer_name(self) -> str:
        """The key under which the harness caches requests."""
        return self._tokenizer.fingerprint

    def tok_encode(self, string: str, add_special_tokens: bool | None = None) -> list[int]:
        """Return the ids of a text; no special token is added."""
        ids: list[int] = self._tokenizer.encode(string).tolist()
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
                LENGTH_HINT,
            )
        tokens = np.array([*context, *continuation])[-(self.max_length + 1) :]
        labels = tokens[1:].copy()
        labels[: len(labels) - len(continuation)] = IGNORED
        return ScoredWindow(tokens[:-1], labels, number)

    def _score(self, rows: Any) -> Any:
        return self.scorer.score_windows(rows, self.batch_size)

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
            texts += self._generate([ids for _, _, ids in batch], batch[0][1])
            for (context, settings, _), text in zip(batch, texts[-len(batch) :], strict=True):
                self.cache_hook.add_partial("generate_until", (context, settings), text)
        answers: list[str] = contexts.get_original(texts)
        return answers

    def _generate(self, prompts: list[list[int]], settings: dict[str, Any]) -> list[str]:
        max_new_tokens, until, probabilities = _read_settings(settings, self.max_gen_toks)
        room = self.max_length - max_new_tokens
        if room < 1:
            raise RecipeError(
                f"a task asks for {max_new_tokens} new tokens; prompt and answer together "
                f"have {self.max_length}",
                LENGTH_HINT,
            )
        generators = [torch.Generator().manual_seed(number) for number in range(len(prompts))]

        def agree(logits: torch.Tensor) -> torch.Tensor:
            self.scorer.check()
            found = probabilities(logits)
            if self.scorer.plan.degrees.world == 1:
                return found
            # All ranks generate every text. Sums in another order could tell them other tokens, and
            # a rank that ends a text earlier would leave the others in a collective.
            found = found.to(self._device)
            dist.broadcast(found, 0)
            return found.cpu()

        return continue_rows(
            self.scorer.model,
            self._tokenizer,
            [prompt[-room:] for prompt in prompts],
            generators,
            agree,
            max_new_tokens,
            until,
        )


def _read_settings(
    settings: dict[str, Any], default_tokens: int
) -> tuple[int, list[str], Callable[[torch.Tensor], torch.Tensor]]:
    """Read a task's `generation_kwargs`; without `do_sample` the likeliest token is taken.

    Returns:
        the largest number of new tokens, stop strings, and what maps logits [B, V] to the
        probabilities to sample from.
    """
    given: dict[str, Any] = dict(normalize_gen_kwargs(settings, default_tokens))
    probabilities = partial(
        sampling_probabilities,
        temperature=float(given.get("temperature") or 1.0) if given.get("do_sample") else 0.0,
        top_k=int(given.get("top_k") or 0),
        top_p=float(given.get("top_p") or 1.0),
    )
    return given["max_gen_toks"], [word for word in given["until"] if word], probabilities


def load_tasks(
    names: Sequence[str], include_path: Path | None, num_fewshot: int | None
) -> dict[str, Any]:
    """Load tasks, groups or tags of the harness with their data.

    Args:
        names: names of tasks, groups or tags of the harness or in `include_path`.
        include_path: a folder with further tasks. They may name Python code, which is executed.
        num_fewshot: examples before each question; None takes each task's own number, and a task
            that has none keeps none.

    Raises:
        RecipeError: a task does not exist or is faulty.
        EnvironmentFault: the data of a task cannot be read or downloaded.
    """
    with _convert_errors():
        loaded: dict[str, Any] = _manager(names, include_path).load(list(names))
        for task in loaded["tasks"].values():
            own = task.get_config("num_fewshot")
            keeps = num_fewshot is None or own == 0
            task.set_config("num_fewshot", (own if keeps else num_fewshot) or 0)
    return loaded


def run_tasks(
    model: HarnessModel, tasks: dict[str, Any], limit: int, *, bootstraps: int = 1000
) -> dict[str, Any]:
    """Run tasks and return the harness's results by task, the same on all ranks.

    Args:
        model: the model.
        tasks: what `load_tasks` returned.
        limit: the number of examples of each task; 0 is all.
        bootstraps: samples from which standard errors are estimated; 0 estimates none.

    Raises:
        RecipeError: a task is faulty, or plans that split a sequence or the vocabulary generate.
        EnvironmentFault: the data of a task cannot be read or downloaded.
    """
    degrees = model.scorer.plan.degrees
    for name, task in tasks["tasks"].items():
        if task.OUTPUT_TYPE == "generate_until" and degrees.world > degrees.data:
            message = f"the task {name} generates text, which tensor and context ranks cannot"
            raise RecipeError(message, "leave it out, and measure checkpoints: trainer evaluate")
        task.set_fewshot_seed(FEWSHOT_SEED)  # each time the same examples
    with _convert_errors(), _own_random_numbers():
        found = evaluate(
            lm=model,
            task_dict=tasks,
            limit=limit or None,
            bootstrap_iters=bootstraps,
            log_samples=False,
        )
    assert found is not None, "only ranks other than 0 get nothing"
    results: dict[str, Any] = found["results"]
    return gather_objects(results)[0] if degrees.world > 1 else results


@contextmanager
def _convert_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:  # of the datasets library too, when it finds no data
        raise EnvironmentFault(f"a task's data cannot be read: {error}") from error
    except (TrainerError, RuntimeError):  # a rank was lost, or memory ran out
        raise
    except Exception as error:  # whatever a faulty template, metric or column leads to
        message = f"the tasks cannot be run: {type(error).__name__}: {error}"
        raise RecipeError(message, "check their files; --traceback shows where") from error


@contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Give tasks the same random numbers each time, and put back the state of all generators."""
    ours, arrays = random_state(0), np.random.get_state()  # the state of numpy's own
    seed_everything(0, 0)
    np.random.seed(FEWSHOT_SEED)
    try:
        yield
    finally:
        restore_random_state(0, ours)
        np.random.set_state(arrays)


def _manager(names: Sequence[str], include_path: Path | None) -> TaskManager:
    """Return the task manager; the harness's own tasks are indexed only if one of them is named."""
    if include_path is not None:
        if not include_path.is_dir():
            raise RecipeError(f"{include_path}: no such folder of tasks")
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
