"""How well-known tokenizers cut text into pieces before byte pairs are merged. Torch-free."""

from __future__ import annotations

from ..errors import RecipeError, nearest

# A piece is merged by itself: no token reaches over its borders. Contractions, words with the space
# before them, runs of digits, punctuation, and white space are pieces.
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = "|".join(
    [
        (
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        ),
        (
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        ),
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

PATTERNS = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "cl100k": _CL100K,
    "llama3": _CL100K,
    "qwen2": _CL100K.replace(r"\p{N}{1,3}", r"\p{N}"),
    "o200k": _O200K,
}
"""by name; of GPT-2, GPT-4, Llama 3, Qwen 2 and GPT-4o"""


def pattern_named(name: str) -> str:
    """Return the regular expression of a name.

    Raises:
        RecipeError: none has it.
    """
    if name not in PATTERNS:
        hint = nearest(name, PATTERNS) or f"known: {', '.join(PATTERNS)}"
        raise RecipeError(f"no pattern is named {name!r}", hint)
    return PATTERNS[name]
