"""`trainer generate`: text from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..engine.inference import Weights


def generate(
    checkpoint: Annotated[
        Path,
        typer.Argument(help="a checkpoint, a run directory (its newest), or a Hugging Face folder"),
    ],
    prompt: Annotated[
        list[str] | None, typer.Option(help="text to continue; give it again for several")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="tokens to add at most")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="0 always takes the likeliest token")
    ] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="only the k likeliest tokens; 0: all")] = 0,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="only the likeliest tokens of this total share")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="other seeds give other samples")] = 0,
    plugin: Annotated[
        list[str] | None, typer.Option(help="Python module that registers the model or tokenizer")
    ] = None,
    weights: Annotated[
        Weights, typer.Option(help='"ema": the averaged weights that [ema] keeps')
    ] = Weights.MODEL,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object a prompt")] = False,
) -> None:
    """Sample from a checkpoint."""
    from ..engine.generate import generate as sample
    from ..engine.inference import open_model

    prompts = prompt or [""]
    opened = open_model(checkpoint, plugin or [], weights=weights)
    texts = sample(
        opened.model,
        opened.tokenizer,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
    )
    for number, (start, text) in enumerate(zip(prompts, texts, strict=True)):
        if as_json:
            typer.echo(json.dumps({"prompt": start, "text": text}))
        else:
            typer.echo(("\n" if number else "") + start + text)
