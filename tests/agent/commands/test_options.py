from __future__ import annotations

import argparse
import json

import pytest

from agent.commands.options import show

NAME = "eth\x1b]0;x\x07\udcff\x9b2J"


@pytest.mark.parametrize("text", ["two\nlines", "Zürich – ▲\n"])
def test_text_for_people_is_shown_as_it_is(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    show(argparse.Namespace(output="text"), {}, text)
    assert capsys.readouterr().out == f"{text}\n"


def test_a_name_gives_no_orders_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    show(argparse.Namespace(output="text"), {}, f"interface {NAME}\nis down")
    assert capsys.readouterr().out == "interface eth\\x1b]0;x\\x07\\udcff\\x9b2J\nis down\n"


def test_a_name_is_whole_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    show(argparse.Namespace(output="json"), {"name": NAME}, "")
    assert json.loads(capsys.readouterr().out) == {"name": NAME}
