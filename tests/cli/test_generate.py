"""`trainer generate`: what it prints, how a chat template lays prompts out, and what it refuses."""

import json
import os
import pty
import subprocess
import sys

import pytest

from tests.commands import run_trainer
from tests.conversion.models import hf_folder
from tests.limits import limited
from trainer.cli.main import main

TEMPLATE = "{% for message in messages %}Q: {{ message.content }}\n{% endfor %}A:"
SHORT = ("--max-new-tokens", "12", "--temperature", "0")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(hf_folder(tmp_path_factory.mktemp("hf") / "model"))


@pytest.fixture
def generate(capsys, folder):
    """Run `trainer generate FOLDER ...` in this process; return exit code, output and errors."""

    def generate(*arguments, checkpoint=folder):
        with pytest.raises(SystemExit) as stop:
            main(["generate", checkpoint, *arguments])
        return int(stop.value.code or 0), *capsys.readouterr()

    return generate


def answers(generate, *arguments):
    code, out, err = generate(*arguments, *SHORT, "--json")
    assert code == 0, err
    return [json.loads(line) for line in out.splitlines()]


def test_a_prompt_of_more_tokens_than_the_model_reads_is_refused_at_once(generate):
    with limited(512):
        code, _, err = generate("--prompt", "word " * 7000)
    assert code == 2
    assert "a prompt has" in err
    assert "--truncate keeps its end" in err


def test_each_prompt_is_continued_and_printed_with_its_text(generate):
    rows = answers(generate, "--prompt", "é = ", "--prompt", "import ")
    assert [row["prompt"] for row in rows] == ["é = ", "import "]
    code, out, _ = generate("--prompt", "é = ", "--prompt", "import ", *SHORT)
    assert (code, out) == (0, "\n\n".join(row["prompt"] + row["text"] for row in rows) + "\n")


def test_a_chat_template_lays_out_the_prompt_and_only_the_answer_is_printed(generate, tmp_path):
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    (expected,) = answers(generate, "--prompt", "Q: Who?\nA:")
    chat = ("--chat", str(tmp_path / "mine.jinja"))
    (found,) = answers(generate, "--prompt", "Who?", *chat)
    assert found == {"prompt": "Who?", "text": expected["text"]}
    assert found != answers(generate, "--prompt", "Who?")[0]
    assert generate("--prompt", "Who?", *chat, *SHORT)[1] == expected["text"] + "\n"


def run_with_input(folder, stdin, *arguments):
    command = [sys.executable, "-P", "-m", "trainer", "generate", folder, *SHORT, *arguments]
    return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, text=True)


def test_each_line_of_a_pipe_is_a_prompt(generate, folder):
    process = run_with_input(folder, subprocess.PIPE, "--json")
    out, _ = process.communicate("é = \nimport \n", timeout=100)
    rows = [json.loads(line) for line in out.splitlines()]
    assert rows == answers(generate, "--prompt", "é = ", "--prompt", "import ")


def test_only_line_ends_separate_prompts(generate, folder):
    process = run_with_input(folder, subprocess.PIPE, "--json")
    out, _ = process.communicate("a\u2028b\x0c\nc\r\n", timeout=100)
    prompts = [json.loads(line)["prompt"] for line in out.splitlines()]
    assert prompts == ["a\u2028b\x0c", "c"]


def test_a_closed_standard_input_is_no_prompt(folder):
    words = " ".join([sys.executable, "-P", "-m", "trainer", "generate", folder, *SHORT, "--json"])
    done = subprocess.run(f"{words} <&-", shell=True, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["prompt"] == ""


def test_a_conversation_on_a_terminal_keeps_its_turns_until_ctrl_d(generate, folder, tmp_path):
    template = tmp_path / "mine.jinja"
    turns = "{{ message.role[0] }}: {{ message.content }}\n"
    template.write_text("{% for message in messages %}" + turns + "{% endfor %}a:")
    (first,) = answers(generate, "--prompt", "u: Who?\na:")
    told = f"u: Who?\na: {first['text']}\nu: Why?\na:"
    (second,) = answers(generate, "--prompt", told)
    master, slave = pty.openpty()
    process = run_with_input(folder, slave, "--chat", str(template), "--json")
    os.close(slave)
    os.write(master, b"Who?\nWhy?\n\x04")
    out, _ = process.communicate(timeout=100)
    os.close(master)
    rows = [json.loads(line.removeprefix("> ")) for line in out.splitlines() if "{" in line]
    assert process.returncode == 0
    assert [row["text"] for row in rows] == [first["text"], second["text"]]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--chat", "chatlm"), 2, 'no template and no file; did you mean "chatml"?'),
        (("--chat", "tokenizer"), 2, "the tokenizer brings no chat template"),
        (("--weights", "ema"), 5, "it has one set of weights"),
        (("--top-p", "2"), 2, "--top-p"),
        (("--max-new-tokens", "0"), 2, "--max-new-tokens"),
        (("--prompt", "\udcff"), 2, "--prompt: not UTF-8"),
        (("--plugin", "nosuch"), 2, "cannot import 'nosuch'"),
    ],
)
def test_what_it_cannot_do_is_refused(generate, arguments, code, message):
    found, out, err = generate("--prompt", "x", *arguments)
    assert (found, out) == (code, "")
    assert message in err
    assert "unexpected" not in err


def test_a_folder_without_weights_is_a_checkpoint_error(generate, tmp_path):
    for place in (tmp_path, tmp_path / "nosuch"):
        code, _, err = generate("--prompt", "x", checkpoint=str(place))
        assert (code, f"no checkpoint in {place}" in err) == (5, True)


def test_processes_that_share_the_blocks_say_what_one_says(folder, tmp_path):
    long = "é = ()\n" * 300  # computed in pieces
    words = ["generate", folder, "--prompt=--x", f"--prompt={long}", "--max-new-tokens=8"]
    words += ["--seed=5", "--truncate", "--json"]
    one, two = (run_trainer(*words, folder=tmp_path, ranks=ranks) for ranks in (1, 2))
    assert (one.returncode, two.returncode) == (0, 0), one.stderr + two.stderr
    assert len(one.stdout.splitlines()) == 2
    assert one.stdout == two.stdout


def test_more_processes_than_blocks_are_refused(folder, tmp_path):
    done = run_trainer("generate", folder, folder=tmp_path, ranks=3)
    assert done.returncode == 2
    assert "3 ranks cannot share the" in done.stderr
