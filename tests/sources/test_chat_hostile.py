"""Chat templates are programs of strangers: what they may not do."""

from pathlib import Path

import pytest

from tests.sources.chats import TALK, template
from trainer.engine.core.errors import DataError
from trainer.engine.sources.chat_renderer import open_renderer


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{% for %}", "in its line 1"),
        ("\n\n{{ 1 + }}", "in its line 3"),
        ("{% include 'x' %}" + "{% if 1 %}" * 10_000 + "{% endif %}" * 10_000, "RecursionError"),
        ("{% unknown %}", "unknown tag"),
    ],
)
def test_a_template_that_is_not_valid_is_an_error(text: str, reason: str) -> None:
    with pytest.raises(DataError, match=reason), open_renderer(template(text)):
        pass


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.__class__.__base__.__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ cycler.__init__.__globals__.os.system('id') }}", "unsafe"),
        ("{{ lipsum.__globals__ }}", "marks nothing"),
        ("{{ strftime_now.__self__ }}", "marks nothing"),
        ("{{ '{0.__class__}'.format(messages) }}", "marks nothing"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
        ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "more than 16777216 char"),
        ("{{ 'x' * 10**10 }}", "more than 2 GiB"),
        ("{{ ''.center(10**11) }}", "more than 2 GiB"),
        ("{{ nothing.at.all }}", "UndefinedError"),
        ("{{ messages[0].content / 0 }}", "TypeError"),
        ("", "marks nothing"),
    ],
)
def test_a_hostile_template_gets_nowhere(text: str, reason: str) -> None:
    with (
        open_renderer(template(text)) as renderer,
        pytest.raises(ValueError, match=reason),
    ):
        renderer.render(TALK, learn="all")


@pytest.mark.parametrize(
    "text",
    [
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x*2 %}{% endfor %}",
        "{{ messages | length ** (10 ** 9) }}",
    ],
)
def test_a_template_that_never_ends_is_ended(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from trainer.engine.sources import chat_renderer as chat

    hasty = tmp_path / "hasty.py"
    source = chat.SANDBOX.read_text()
    assert "MAX_SECONDS = 10\n" in source
    hasty.write_text(source.replace("MAX_SECONDS = 10\n", "MAX_SECONDS = 1\n"))
    monkeypatch.setattr(chat, "SANDBOX", hasty)
    with pytest.raises((DataError, ValueError)) as error, open_renderer(template(text)) as renderer:
        renderer.render(TALK, learn="all")
    assert any(word in str(error.value) for word in ("10 seconds", "GiB of memory"))


def test_a_hostile_template_cannot_say_more_than_fits() -> None:
    text = "{{ raise_exception('x' * 99999999) }}"
    with (
        open_renderer(template(text)) as renderer,
        pytest.raises(ValueError, match="the template stopped: x") as error,
    ):
        renderer.render(TALK, learn="all")
    assert len(str(error.value)) < 2000


def test_the_process_that_renders_can_open_no_file(tmp_path: Path) -> None:
    from trainer.engine.sources import chat_renderer as chat

    text = chat.SANDBOX.read_text().replace(
        "        signal.alarm(0)\n",
        "        signal.alarm(0)\n        reply = {'error': tried()}\n",
    )
    text = text.replace(
        "def main()", "def tried():\n    try:\n        open('/etc/hostname')\n"
        "    except OSError as error:\n        return error.strerror\n\n\ndef main()",
    )  # fmt: skip
    (tmp_path / "curious.py").write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat, "SANDBOX", tmp_path / "curious.py")
        with (
            pytest.raises(DataError, match="Too many open files"),
            open_renderer(template("x")),
        ):
            pass
