"""`trainer generate`: text from a checkpoint."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
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
        list[str] | None, typer.Option(help="text to continue; give it again for several")
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
            "chatml, llama3 or a file) and print the answer",
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
    prompts = prompt or [""]
    if any("\ud800" <= char <= "\udfff" for text in prompts for char in text):
        raise RecipeError("--prompt: not UTF-8")
    run_on_ranks(context, nproc)
    found = find_model(checkpoint, plugin or [])  # errors come before torch is imported
    inputs.require_generation(found.recipe.model, found.recipe.task)
    from ..engine.inference.generate import generate as generate_texts
    from ..engine.inference.open import join_ranks, open_found

    with join_ranks() as world:
        opened = open_found(found, weights=weights, world=world)
        starts, until = _apply_template(prompts, chat, opened.tokenizer) if chat else (prompts, [])
        texts = generate_texts(
            opened,
            starts,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            until=until,
            truncate=truncate,
        )
    if world.rank == 0:
        _print(prompts, texts, chat=bool(chat), as_json=as_json)


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
        try:
            starts = [
                renderer.render_prompt([{"role": "user", "content": each}]) for each in prompts
            ]
            return starts, [end] if (end := renderer.find_end_of_answer()) else []
        except ValueError as error:
            raise DataError(f"{found.place}: {error}") from error
