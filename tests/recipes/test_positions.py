"""Positions are compared with a writer that notes where it puts each key."""

import json
import random
import string

import pytest
import tomli

from trainer.engine.core.text.positions import MAX_DEPTH, Positions, SizeError


class Writer:
    """Writes a random TOML text and remembers line and column of each key and element."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.text = ""
        self.places = {}
        self.names = 0

    def note(self, path, replace=True):
        line = self.text.count("\n") + 1
        place = (line, len(self.text) - (self.text.rfind("\n") + 1) + 1)
        if replace or path not in self.places:
            self.places[path] = place

    def name(self):
        """Return a fresh key, and how it is spelled."""
        self.names += 1
        plain = f"{self.random.choice(['k', 'key-', '7_'])}{self.names}"
        odd = plain + self.random.choice([" ", ".", "é", "#", "=", "[", '"', "\n", "\t", "\\"])
        return self.random.choice(
            [(plain, plain), (plain, f"'{plain}'"), (plain, f'"{plain}"'), (odd, json.dumps(odd))]
        )

    def space(self):
        self.text += self.random.choice(["", "", " ", "\t", "  "])

    def gap(self):
        """Write what may stand between statements and between array elements."""
        for _ in range(self.random.randrange(3)):
            self.text += self.random.choice(["\n", " \n", '# [x] = \'y\' """\n', "\r\n", "  "])

    def dotted(self, table, most=3):
        """Write a key of one to `most` parts and return the path that it names."""
        path = table
        for index in range(self.random.randint(1, most)):
            if index:
                self.space()
                self.text += "."
                self.space()
            name, spelled = self.name()
            path = (*path, name)
            self.note(path)
            self.text += spelled
        return path

    def value(self, path, depth=0):
        kind = self.random.randrange(8 if depth < 3 else 6)
        if kind == 6:
            self.array(path, depth)
        elif kind == 7:
            self.inline_table(path, depth)
        else:
            words = ["[x]", "a = 1", "#", ",", "}", "]", "'", "é", "\\\\", '\\"', "\\u00e9"]
            inner = "".join(self.random.choices(words, k=3))
            literal = inner.replace("'", "")
            self.text += self.random.choice(
                [
                    "1", "-1_000", "0xfF", "1e-5", "+nan", "true", "1979-05-27T07:32:00Z",
                    "1979-05-27 07:32:00.5", "07:32:00", "1979-05-27",
                    f'"{inner}"', f"'{literal}'", f"'''{literal}\n'{literal}'''", "'''a''''",
                    f'"""{inner}\n ""{inner}"""', '"""a"""""', '""""""', "''''''", '""', "''",
                ]
            )  # fmt: skip

    def array(self, path, depth):
        self.text += "["
        for index in range(self.random.randrange(4)):
            self.gap()
            self.note((*path, index))
            self.value((*path, index), depth + 1)
            self.gap()
            self.text += ","
        self.gap()
        self.text += "]"

    def inline_table(self, path, depth):
        self.text += "{"
        for index in range(self.random.randrange(3)):
            self.text += ", " if index else " "
            self.pair(path, depth + 1)
        self.text += "}"

    def pair(self, table, depth=0):
        path = self.dotted(table)
        self.space()
        self.text += "="
        self.space()
        self.value(path, depth)

    def document(self):
        for _ in range(self.random.randrange(4)):
            self.statement(())
        arrays = []
        for _ in range(self.random.randrange(1, 5)):
            self.gap()
            if not self.text.endswith("\n"):
                self.text += "\n"
            if arrays and self.random.random() < 0.4:
                table = self.next_table(self.random.choice(arrays))
            elif self.random.random() < 0.4:
                table = self.first_table(arrays)
            else:
                self.text += "["
                table = self.dotted(())
                self.text += "]"
            self.text += "\n"
            for _ in range(self.random.randrange(4)):
                self.statement(table)
        return self.text

    def statement(self, table):
        self.gap()
        if self.text and not self.text.endswith("\n"):
            self.text += "\n"
        self.space()
        self.pair(table)
        self.text += self.random.choice(["\n", " # c\n", "\r\n"])

    def first_table(self, arrays):
        name = "".join(self.random.choices(string.ascii_lowercase, k=12))
        arrays.append([name, 0])
        return self.next_table(arrays[-1])

    def next_table(self, array):
        name, count = array
        array[1] += 1
        self.text += "[[ "
        self.note((name,), replace=False)
        self.note((name, count))
        self.text += f"{name}]]"
        return (name, count)


@pytest.mark.parametrize("seed", range(300))
def test_every_key_is_found_where_the_writer_put_it(seed):
    writer = Writer(seed)
    text = writer.document()
    tomli.loads(text)
    assert dict(Positions(text).items()) == writer.places


def every_path(value, path=()):
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*path, key)
        if isinstance(inner, dict | list):
            yield from every_path(inner, (*path, key))


@pytest.mark.parametrize("seed", range(300, 400))
def test_every_key_that_the_parser_finds_has_a_position(seed):
    text = Writer(seed).document()
    assert set(every_path(tomli.loads(text))) == {path for path, _ in Positions(text).items()}


def test_tables_below_an_array_of_tables_belong_to_its_last_entry():
    text = "[[a]]\n[a.b]\nc = 1\n[[a]]\n[a.b]\nc = 2\n[[a.d]]\n[[a.d]]\ne = 3\n"
    positions = dict(Positions(text).items())
    assert positions["a", 0, "b", "c"] == (3, 1)
    assert positions["a", 1, "b", "c"] == (6, 1)
    assert positions["a", 1, "d", 1, "e"] == (9, 1)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("\nx = " + "[" * 40 + "]" * 40, (2, 5 + MAX_DEPTH)),
        ("a = 1\n " + ".".join("b" * 40) + " = 1", (2, 2)),
        ("[" + ".".join("b" * 33) + "]", (1, 2)),
    ],
)
def test_deep_nesting_is_refused_at_its_place(text, place):
    tomli.loads(text)
    with pytest.raises(SizeError) as caught:
        Positions(text)
    assert (caught.value.line, caught.value.column) == place
