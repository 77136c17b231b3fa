"""Lists the patterns by which well-known tokenizers split text before BPE merges. Torch-free."""

from __future__ import annotations

from ..core.errors import RecipeError, nearest

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
"""regular expressions by name, in this order those of GPT-2, GPT-4, Llama 3, Qwen 2 and GPT-4o"""

_LLAMA3_NAMED = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id"}
_LLAMA3_NAMED[9] = "eot_id"
_LLAMA3_OTHERS = iter(range(256))

SPECIAL_TOKENS: dict[str, tuple[int, dict[str, int]]] = {
    "gpt2": (50256, {"<|endoftext|>": 50256}),
    "cl100k": (
        100256,
        {
            "<|endoftext|>": 100257,
            "<|fim_prefix|>": 100258,
            "<|fim_middle|>": 100259,
            "<|fim_suffix|>": 100260,
            "<|endofprompt|>": 100276,
        },
    ),
    "llama3": (
        128000,
        {
            f"<|{_LLAMA3_NAMED[i]}|>"
            if i in _LLAMA3_NAMED
            else f"<|reserved_special_token_{next(_LLAMA3_OTHERS)}|>": 128000 + i
            for i in range(256)
        },
    ),
    "qwen2": (
        151643,
        {"<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645},
    ),
    "o200k": (199998, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
}
"""by pattern: the number of tokens in the published file, and the ids of its special tokens"""


def find_pattern(name: str) -> str:
    """Return the regular expression with a name in `PATTERNS`.

    Raises:
        RecipeError: no pattern has this name.
    """
    if name not in PATTERNS:
        hint = nearest(name, PATTERNS) or f"known: {', '.join(PATTERNS)}"
        raise RecipeError(f"no pattern is named {name!r}", hint)
    return PATTERNS[name]
