"""Every kind of fault is said in our words, at its place, with what was probably meant."""

import pytest

from trainer.engine.core.errors import RecipeError

RUN = "[run]\nsteps = 1\n"
LATER = "is not available in this version"

FAULTS = [
    # text after RUN (which has two lines), line, column, key, message, hint
    ("stpes = 2", 3, 1, "run.stpes", 'unknown key "stpes"', 'did you mean "steps"?'),
    ("seq_len = 2", 3, 1, "run.seq_len", 'unknown key "seq_len"', "it belongs to [data]"),
    ("[optimiser]", 3, 2, "optimiser", 'unknown key "optimiser"', 'did you mean "optimizer"?'),
    ('seed = "3"', 3, 1, "run.seed", 'expected an integer, got "3"', "remove the quotes"),
    ("seed = 1.5", 3, 1, "run.seed", "expected an integer, got 1.5", ""),
    ("seed = true", 3, 1, "run.seed", "expected an integer, got true", ""),
    ("seed = 1979-05-27", 3, 1, "run.seed", "expected an integer, got 1979-05-27", ""),
    ("seed = -1", 3, 1, "run.seed", "expected at least 0, got -1", ""),
    ("dir = 3", 3, 1, "run.dir", "expected a string, got 3", ""),
    (
        "deterministic = \"True\"",
        3, 1, "run.deterministic", 'expected true or false, got "True"',
        "write true, without quotes",
    ),
    ("[optimizer]\nlr = nan", 4, 1, "optimizer.lr", "expected a finite number, got nan", ""),
    ("[optimizer]\nlr = -1", 4, 1, "optimizer.lr", "expected at least 0, got -1", ""),
    ("[optimizer]\neps = 0", 4, 1, "optimizer.eps", "expected more than 0, got 0", ""),
    ("[optimizer]\nbetas = 3", 4, 1, "optimizer.betas", "expected a list, got 3", ""),
    ('[optimizer]\nbetas = [0, "a"]', 4, 13, "optimizer.betas.1", 'expected a number, got "a"', ""),
    ("[optimizer]\nbetas = [0, 2]", 4, 13, "optimizer.betas.1", "expected less than 1, got 2", ""),
    (
        "[optimizer]\nbetas = [1, 2, 3]",
        4, 1, "optimizer.betas", "expected a list of at most 2, got one of 3", "",
    ),
    (
        "[data]\nsources = []",
        4, 1, "data.sources", "expected a list of at least 1, got one of 0", "",
    ),
    ("[data]\nsources = [3]", 4, 12, "data.sources.0", "expected a table, got 3", ""),
    (
        '[data]\nsources = ["python"]',
        4, 12, "data.sources.0", 'expected a table, got "python"', 'write { name = "python" }',
    ),
    ("data = 3\n[x]\n", 3, 1, "run.data", 'unknown key "data"', ""),
    (
        "[precision]\ncompute = 3",
        4, 1, "precision.compute", 'expected "auto", "fp32", "bf16" or "fp16", got 3', "",
    ),
    (
        '[precision]\ncompute = "bf61"',
        4, 1, "precision.compute", 'expected "auto", "fp32", "bf16" or "fp16", got "bf61"',
        'did you mean "bf16"?',
    ),
    (
        '[optimizer]\nname = "adamwx"',
        4, 1, "optimizer.name",
        'no optimizer is named "adamwx"',
        'did you mean "adamw"?',
    ),
    (
        '[model]\nflavor = "8bb"',
        4, 1, "model.flavor", 'no flavor is named "8bb"; known: debug, 1b, 3b, 8b, 70b, 405b',
        'did you mean "8b"?',
    ),
    (
        '[[data.sources]]\nname = "jsonl"',
        3, 8, "data.sources.0.path",
        "is missing: a file, a folder or a glob; relative to the recipe", "",
    ),
    (
        '[[optimizer.groups]]\nmatch = "*"\nwd = 0.0',
        5, 1, "optimizer.groups.0.wd", 'unknown key "wd"', "",
    ),
    (
        "[model]\nn_kv_heads = 3",
        4, 1, "model.n_kv_heads", "n_heads (4) must be a multiple of n_kv_heads (3)", "",
    ),
    (
        "[model.rope_scaling]\nfactr = 3",
        4, 1, "model.rope_scaling.factr", 'unknown key "factr"', 'did you mean "factor"?',
    ),
    ('[kernels]\nattention = "triton"', 4, 1, "kernels.attention", f'"triton" {LATER}', ""),
    (
        '[precision.float8]\nrecipe = "row_wise"',
        4, 1, "precision.float8.recipe",
        'expected "tensorwise", "rowwise" or "rowwise_with_gw_hp", got "row_wise"',
        'did you mean "rowwise"?',
    ),
    ("\"a\\nb\\u001b\" = 1", 3, 1, 'run."a\\nb\\u001b"', 'unknown key "a\\nb\\u001b"', ""),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "column", "key", "message", "hint"), FAULTS)
def test_a_fault_is_located_and_explained(problems, text, line, column, key, message, hint):
    found = problems(RUN + text)
    places = [(each.line, each.column, each.key) for each in found]
    assert (line, column, key) in places, found
    problem = found[places.index((line, column, key))]
    assert problem.file == "recipe.toml"
    assert problem.message == message
    if hint:
        assert problem.hint == hint


def test_all_faults_are_reported_at_once_in_the_order_of_the_file(problems):
    text = '[run]\nstpes = 1\n[optimizer]\nlr = "x"\n[data]\nseq_len = 0\n[nope]\n'
    found = problems(text, "metrics.interval=0")
    assert [each.key for each in found] == [
        "metrics.interval", "run.stpes", "optimizer.lr", "data.seq_len", "nope",
    ]  # fmt: skip


def test_faults_that_come_through_extends_name_the_file_that_wrote_them(write, problems):
    write("base.toml", "[run]\nsteps = 1\n\n[optimizer]\nlearning_rate = 3\n")
    [problem] = problems('extends = ["base.toml"]\n[data]\nseq_len = 8\n')
    assert (problem.file, problem.line, problem.column) == ("base.toml", 5, 1)


def test_thousands_of_faults_are_counted_not_printed(problems):
    found = problems("[run]\nsteps = 1\n" + "".join(f"x{index} = 1\n" for index in range(5000)))
    assert len(found) == 101
    assert found[-1].message == "and 4900 more problems"


@pytest.mark.parametrize(
    ("text", "line", "column", "message"),
    [
        (b"[run]\nsteps = \n", 2, 9, "expected a value"),
        (b"[run]\nsteps = abc\n", 2, 9, "expected a value"),
        (b"[run]\nsteps = 1\nsteps = 2\n", 3, 10, "this key is given twice"),
        (b"[run]\na = '\xff'\n", 2, 6, "byte 0xff is not UTF-8"),
        (b"[run]\na = '\x01'\n", 2, 6, "found invalid character '\\x01'"),
        (b"a = [\n" + b"[" * 500 + b"]" * 500 + b"]", 2, 32, "nested deeper than 32 levels"),
        (b"[run]\n" + b".".join([b"a"] * 1500) + b" = 1", 2, 1, "nested deeper than 32 levels"),
        (b"[run]\nsteps = " + b"9" * 5000, 2, 9, "an integer must fit into 64 bits"),
        (b"[run]\nsteps = 9223372036854775808", 2, 1, "an integer must fit into 64 bits"),
        (b"[run]\na = 1\n[run]\n", 3, 5, "[run] is declared twice"),
        (b"[run]\na.b = 1\n[run.a]", 3, 7, "[run.a] is declared twice"),
        (b'[run]\nname = "abc\n', 2, 12, "the string does not end on its line"),
        (b'[run]\nname = "a\\u0000"\n', 2, 1, "text must not hold the character U+0000"),
    ],
)
def test_broken_toml_is_located(problems, text, line, column, message):
    [problem] = problems(text)
    assert (problem.line, problem.column) == (line, column), problem
    assert problem.message.lower().startswith(message.lower()), problem


def test_a_word_without_quotes_is_told_apart(problems):
    assert problems("[run]\nresume = auto\n")[0].hint == 'text needs quotes: "auto"'
    assert problems("[run]\ndeterministic = True\n")[0].hint == "write true"


def test_a_byte_order_mark_is_accepted(load):
    assert load(b"\xef\xbb\xbf[run]\nsteps = 4\n").recipe.run.steps == 4


def test_long_values_and_control_characters_are_shown_safely(problems):
    [problem] = problems('[run]\nsteps = "' + "x" * 5000 + '\\u001b[31m\\u202e"\n')
    assert len(problem.render()) < 200
    assert problem.render().isprintable()


def test_the_text_of_an_error_has_file_line_key_and_hint_of_every_problem(load):
    with pytest.raises(RecipeError) as caught:
        load(RUN + "stpes = 2\nseed = 1.5\n")
    assert str(caught.value).splitlines() == [
        'recipe.toml:3:1: run.stpes: unknown key "stpes"; did you mean "steps"?',
        "recipe.toml:4:1: run.seed: expected an integer, got 1.5",
    ]


def test_a_warm_up_longer_than_the_run_says_what_to_set(load):
    for text, override in (
        ("[run]\nsteps = 2\n[schedule]\nwarmup_steps = 20\n", "run.seed=1"),
        ("[run]\nsteps = 50\n[schedule]\nwarmup_steps = 2\n", "schedule.warmup_steps=60"),
    ):
        with pytest.raises(RecipeError) as caught:
            load(text, override)
        (problem,) = caught.value.problems
        assert problem.hint.startswith("set schedule.warmup_steps to at most ")


def test_a_run_that_set_shortens_keeps_the_share_of_its_warm_up(load):
    text = "[run]\nsteps = 50\n[schedule]\nwarmup_steps = 20\n"
    loaded = load(text, "run.steps=10")
    assert loaded.recipe.schedule.warmup_steps == 4
    (warning,) = loaded.warnings
    assert "schedule.warmup_steps is 4 instead of 20 (recipe.toml:4)" in warning
    assert "--set run.steps=10" in warning
    assert not load(text, "run.steps=20").warnings
    assert load("[run]\n" + text[17:], "run.steps=10").recipe.schedule.warmup_steps == 1
