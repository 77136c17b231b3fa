"""Describes a tokenizer by the keys of a GGUF file, where they can say it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.files import read_regular
from ..tokenizers.byte_tokenizer import begin_id
from ..tokenizers.patterns import PATTERNS
from ..tokenizers.tokenizer import Tokenizer

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""kinds of tokens in `tokenizer.ggml.token_type`"""
PRE_TOKENIZERS = {
    PATTERNS["gpt2"]: "gpt-2",
    PATTERNS["llama3"]: "llama-bpe",
    PATTERNS["qwen2"]: "qwen2",
    PATTERNS["o200k"]: "gpt-4o",
}
"""pattern by which text is cut before merges -> llama.cpp's name of it"""
MAX_TOKENIZER_BYTES = 2**27


def describe_tokenizer(tokenizer: Tokenizer | None, rows: int, notes: list[str]) -> dict[str, Any]:
    """Return the keys that describe a byte-level BPE; nothing, and a note, for other tokenizers.

    Args:
        tokenizer: the tokenizer; None: there is none.
        rows: rows of the embedding; those without a token are named as unused.
        notes: sentences for the user.
    """
    if tokenizer is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        file = Path(folder) / "tokenizer.json"
        content = json.loads(read_regular(file, MAX_TOKENIZER_BYTES)) if file.is_file() else {}
    pre = _pre_tokenizer(content)
    if pre is None:
        notes.append(
            "the file holds no tokenizer: GGUF describes byte-level BPEs with the patterns of "
            "GPT-2, Llama 3, Qwen 2 and GPT-4o; give llama.cpp the tokenizer another way"
        )
        return {}
    vocabulary: Mapping[str, int] = content["model"]["vocab"]
    tokens, kinds = [f"[PAD{row}]" for row in range(rows)], [UNUSED] * rows
    for token, number in vocabulary.items():
        tokens[number], kinds[number] = token, NORMAL
    for added in content.get("added_tokens", ()):
        kind = CONTROL if added["special"] else USER_DEFINED
        tokens[added["id"]], kinds[added["id"]] = added["content"], kind
    merges = content["model"].get("merges") or []
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": [m if isinstance(m, str) else " ".join(m) for m in merges],
        "tokenizer.ggml.eos_token_id": tokenizer.eos_id,
        "tokenizer.ggml.add_bos_token": begin_id(tokenizer) is not None,
    }
    if (bos := begin_id(tokenizer)) is not None:
        found["tokenizer.ggml.bos_token_id"] = bos
    if tokenizer.chat_template is not None:
        found["tokenizer.chat_template"] = tokenizer.chat_template
    return found


def _pre_tokenizer(content: Mapping[str, Any]) -> str | None:
    """Return llama.cpp's name of how a tokenizer cuts text; None: it has none."""
    model, steps = content.get("model") or {}, content.get("pre_tokenizer") or {}
    normalizer = content.get("normalizer")
    if model.get("type") != "BPE" or (normalizer and normalizer.get("type") != "NFC"):
        return None
    parts = steps.get("pretokenizers", [steps])
    last = parts[-1]
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return None
    if len(parts) == 1:
        # Without merges a text is its bytes, however it is cut.
        is_gpt2 = last.get("use_regex", True) or not model.get("merges")
        return "gpt-2" if is_gpt2 else None
    if len(parts) > 2 or last.get("use_regex", True):
        return None
    pattern = (parts[0].get("pattern") or {}).get("Regex", "")
    return PRE_TOKENIZERS.get(pattern)
