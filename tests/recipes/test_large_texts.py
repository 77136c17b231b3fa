"""Texts of a megabyte that would take long to read if anything were done once for each letter."""

import pytest

from tests.limits import limited

RUNS = ("1" * 3990 + ",") * 240
TEXTS = {
    "integers": f"a = [{RUNS}{'1' * 5000}]",
    "integer": "a = " + "1" * 999_000,
    "underscores": "a = " + "1_1" * 300_000,
    "hexadecimals": "a = [" + ("0x" + "f" * 20_000 + ",") * 48 + "]",
    "floats": "a = [" + ("0." + "1" * 4000 + ",") * 240 + "]",
    "exponent": "a = 1e" + "1" * 900_000,
    "date": "a = 1979-05-27T07:32:00." + "9" * 900_000,
    "key": "a" * 900_000 + " = 1",
    "digits as a key": "1" * 900_000 + " = 1",
    "parts of a key": ".".join(["a"] * 400_000) + " = 1",
    "parts of a table": "[" + ".".join(["a"] * 400_000) + "]",
    "arrays": "a = " + "[" * 400_000 + "]" * 400_000,
    "tables": "a = " + "{a=" * 200_000 + "1" + "}" * 200_000,
    "escapes": 'a = "' + "\\u0041" * 150_000 + '"',
    "quotes": 'a = """' + '"" ' * 300_000 + '"""',
    "continued lines": 'a = """' + "\\\n  " * 200_000 + '"""',
    "headers": "[[a]]\n" * 160_000,
    "a string without an end": '"' + "a" * 900_000,
    "no value": "a = " + "1" * 450_000 + "x" * 450_000,
}


@pytest.mark.parametrize("kind", list(TEXTS))
def test_a_text_of_a_megabyte_is_refused_in_little_time_and_memory(problems, kind: str) -> None:
    with limited(512, cpu_seconds=4):
        assert problems(TEXTS[kind])
