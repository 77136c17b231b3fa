"""The tokenizer that a folder of tokens keeps beside them."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from ..core.errors import DataError, nearest
from ..tokenizers.configs import tokenizers
from ..tokenizers.tokenizer import Tokenizer
from .manifest import read_manifest

FOLDER = "tokenizer"


def kept_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer that made the tokens of a folder.

    Raises:
        DataError: the folder does not hold it, or holds another one.
    """
    manifest = read_manifest(folder)
    name = manifest.tokenizer_name
    if not name:
        raise DataError(f"{folder}: does not say which tokenizer made it")
    if name not in tokenizers:
        known = nearest(name, tokenizers) or f"known: {', '.join(tokenizers)}"
        raise DataError(
            f"{folder}: made by the tokenizer {name!r}, which no installed package has", known
        )
    config = tokenizers[name]
    values = {"name": name}
    if "path" in config.model_fields:
        values["path"] = str(folder / FOLDER)
    try:
        tokenizer = config.model_validate(values).build()
    except ValidationError as error:
        raise DataError(f"{folder}: its tokenizer {name!r} cannot be built: {error}") from error
    if tokenizer.fingerprint != manifest.tokenizer:
        raise DataError(f"{folder / FOLDER}: not the tokenizer that made the tokens")
    return tokenizer
