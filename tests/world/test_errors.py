"""The package's own errors: a traceback of one ends with the address of what the troubleshooting page says about it."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import traceback

import pytest

from lightning_zero import errors
from tests.helpers.samples import control
from tests.helpers.script import ROOT
from tests.helpers.world import run_world

OURS = [name for name in errors.__all__ if inspect.isclass(getattr(errors, name)) and name != "ZeroError"]
PAGE = "https://github.com/lightning-zero/lightning-zero/blob/main/docs/troubleshooting.md"


def told(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip("\n")


@pytest.mark.parametrize("name", OURS)
def test_a_traceback_ends_with_the_address_also_of_a_copy(name: str) -> None:
    error = getattr(errors, name)("The disk is full.")

    for one in (error, pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert told(one).endswith(f"{name}: The disk is full.\nSee {PAGE}#{name.lower()}")
        assert told(one).count(PAGE) == 1
        assert errors.with_notes(one) == f"The disk is full.\nSee {PAGE}#{name.lower()}"


def test_the_page_has_what_an_address_leads_to() -> None:
    """GitHub, and MyST for Sphinx, make the anchor of a heading of one word by writing it in small letters."""
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)

    assert set(OURS) <= set(headings)
    assert len({heading.lower() for heading in headings}) == len(headings)
    assert (ROOT / PAGE.rpartition("/main/")[2]).is_file()


def test_a_class_that_a_user_derives_leads_to_its_base() -> None:
    class Ours(errors.CheckpointError):
        pass

    assert told(Ours("The disk is full.")).endswith(f"\nSee {PAGE}#checkpointerror")
    assert told(errors.ZeroError("Something.")).endswith(f"\nSee {PAGE}")


def test_a_message_that_quotes_another_has_the_address_once() -> None:
    inner = errors.OffloadError("The disk is full.")
    error = errors.CheckpointError(f"Could not write: {inner} Nothing is lost.")

    assert told(error).count(PAGE) == 1
    assert told(error).endswith(f": The disk is full. Nothing is lost.\nSee {PAGE}#checkpointerror")


def test_what_ranks_tell_each_other_has_the_address_once() -> None:
    def rank(number: int) -> str:
        def action() -> None:
            if number == 1:
                raise errors.OffloadError("The disk is full.")

        with pytest.raises(errors.CheckpointError) as raised:
            control().together("write", action)
        raised.value.__cause__ = None
        return told(raised.value)

    for text in run_world(2, rank):
        assert text.count(PAGE) == 1
        assert text.endswith(f": The disk is full.\nSee {PAGE}#checkpointerror")
