"""`trainer generate`: text from a checkpoint."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from ..engine.assemble.found_model import find_model
from ..engine.core.errors import RecipeError
from ..engine.core.text.display import make_lines_printable
from ..engine.inference import inputs
from ..engine.tokenizers.tokenizer import Tokenizer
from .model_options import TrainedModel, Weights
from .options import Plugins
from .ranks import run_on_ranks


def generate(
    context: typer.Context,
    checkpoint: TrainedModel,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            help="text to continue; repeat it for several; without it, each line of a pipe or file "
            "on standard input is a prompt"
        ),
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, max=1_000_000, help="tokens to add at most")
    ] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 always takes the likeliest token")
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option(min=0, max=2**31, help="only the k likeliest tokens; 0: all")
    ] = 0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="only the likeliest tokens of this total share")
    ] = 1.0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="other seeds give other samples")
    ] = 0,
    chat: Annotated[
        str,
        typer.Option(
            metavar="TEMPLATE",
            help="each prompt is a user's message: lay it out by this chat template (tokenizer, "
            "chatml, llama3 or a file) and print the answer; without a prompt on a terminal, hold "
            "a conversation until Ctrl-D",
        ),
    ] = "",
    truncate: Annotated[
        bool, typer.Option("--truncate", help="keep the end of a prompt that the model cannot read")
    ] = False,
    plugin: Plugins = None,
    weights: Weights = inputs.Weights.MODEL,
    nproc: Annotated[
        int,
        typer.Option(
            min=1, max=4096, help="processes on this machine that share the model's blocks"
        ),
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a prompt")] = False,
) -> None:
    """Sample from a checkpoint."""
    context.params["prompt"] = prompts = prompt or _read_prompts() or [""]
    if any("\ud800" <= char <= "\udfff" for text in prompts for char in text):
        raise RecipeError("--prompt: not UTF-8" if prompt else "standard input: not UTF-8")
    is_talk = bool(chat) and prompts == [""] and os.isatty(0)
    if is_talk and max(nproc, _count_ranks()) > 1:
        raise RecipeError("a conversation runs in one process", "leave --nproc out")
    run_on_ranks(context, nproc)
    found = find_model(checkpoint, plugin or [])  # errors come before torch is imported
    inputs.require_generation(found.recipe.model, found.recipe.task)
    from ..engine.inference.generate import generate as generate_texts
    from ..engine.inference.open import join_ranks, open_found

    with join_ranks() as world:
        opened = open_found(found, weights=weights, world=world)
        sample = partial(
            generate_texts,
            opened,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            truncate=truncate,
        )
        if is_talk:
            _talk(sample, chat, opened.tokenizer, as_json=as_json)
            return
        starts, until = _apply_template(prompts, chat, opened.tokenizer) if chat else (prompts, [])
        texts = sample(starts, until=until)
    if world.rank == 0:
        _print(prompts, texts, chat=bool(chat), as_json=as_json)


def _count_ranks() -> int:
    from ..engine.launch.environment import find_world

    return find_world().world_size


def _read_prompts() -> list[str]:
    """Return the lines of standard input where that is a pipe or a file; else nothing."""
    if _count_ranks() > 1:
        return []  # ranks that another launcher has started must all have the same prompts
    try:
        mode = os.fstat(0).st_mode
    except OSError:  # it is closed
        return []
    if not (stat.S_ISFIFO(mode) or stat.S_ISREG(mode)):
        return []
    text = sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
    # `splitlines` would also split at characters that a prompt may hold, such as U+2028.
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")]


def _talk(
    sample: Callable[..., Sequence[str]], template: str, tokenizer: Tokenizer, *, as_json: bool
) -> None:
    """Answer the messages that a user types, each after all turns, until the end of the input.

    Args:
        sample: continues a list of texts.
        template: the chat template.
        tokenizer: the tokenizer of the model.
        as_json: print each answer as an object.
    """
    with suppress(ImportError):
        import_module("readline")  # edits the line that is typed, where Python has it
    messages: list[dict[str, str]] = []
    with _open_template(template, tokenizer) as (render, until), suppress(EOFError):
        while True:
            messages.append({"role": "user", "content": _read_message()})
            (text,) = sample([render(messages)], until=until)
            messages.append({"role": "assistant", "content": text})
            _print([messages[-2]["content"]], [text], chat=True, as_json=as_json)
    print()


def _read_message() -> str:
    try:
        return input("> ")
    except UnicodeDecodeError:
        raise RecipeError("standard input: not UTF-8") from None


def _print(prompts: Sequence[str], texts: Sequence[str], *, chat: bool, as_json: bool) -> None:
    for number, (start, text) in enumerate(zip(prompts, texts, strict=True)):
        if as_json:
            typer.echo(json.dumps({"prompt": start, "text": text}))
        else:
            text = ("\n" if number else "") + ("" if chat else start) + text
            # A file gets what the model said; a terminal would act upon some of it.
            print(make_lines_printable(text) if sys.stdout.isatty() else text)


def _apply_template(
    prompts: Sequence[str], template: str, tokenizer: Tokenizer
) -> tuple[list[str], list[str]]:
    """Return the texts that the answers to the prompts continue, and what ends an answer."""
    with _open_template(template, tokenizer) as (render, until):
        return [render([{"role": "user", "content": each}]) for each in prompts], until


@contextmanager
def _open_template(
    template: str, tokenizer: Tokenizer
) -> Iterator[tuple[Callable[[list[dict[str, str]]], str], list[str]]]:
    """Yield a function that renders conversations by a template, and the texts that end an answer.

    Raises:
        RecipeError: no template has that name.
        DataError: the template refuses the messages.
    """
    from ..engine.core.errors import DataError, nearest
    from ..engine.sources.chat_renderer import TEMPLATES, find_template, open_renderer

    names = ("tokenizer", *TEMPLATES)
    if template in names:
        found = find_template(tokenizer, template)
    elif Path(template).is_file():
        found = find_template(tokenizer, file=template)
    else:
        hint = nearest(template, names) or f"known: {', '.join(names)}"
        raise RecipeError(f"--chat: {template!r} is no template and no file", hint)
    with open_renderer(found) as renderer:

        def render(messages: list[dict[str, str]]) -> str:
            try:
                return renderer.render_prompt(messages)
            except ValueError as error:
                raise DataError(f"{found.place}: {error}") from error

        try:
            end = renderer.find_end_of_answer()
        except ValueError as error:
            raise DataError(f"{found.place}: {error}") from error
        yield render, [end] if end else []
