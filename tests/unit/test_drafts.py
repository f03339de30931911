"""llamarl/disk/drafts.py: a file in pieces, each whole after a kill."""

import pytest

from llamarl.disk.drafts import Draft
from llamarl.errors import InUse, RunDirectoryError


@pytest.fixture
def draft_of(tmp_path):
    """draft_of(anew=False): of one file, as often as asked; all closed afterwards."""
    made = []

    def open_draft(*, anew=False, about=None):
        draft = Draft(tmp_path / "deep" / "file", about=about or {"what": 1}, anew=anew)
        made.append(draft)
        return draft

    yield open_draft
    for draft in made:
        draft.close()


def test_a_whole_file_takes_its_place_alone(draft_of):
    draft = draft_of()
    assert draft.notes == {}
    draft.add("one\n", {"lines": 1})
    assert not draft.file.exists()
    draft.add("", {"lines": 1})
    draft.add("zwei ü\n", {"lines": 2})
    draft.finish()
    assert draft.file.read_text() == "one\nzwei ü\n"
    assert [file.name for file in draft.file.parent.iterdir()] == ["file"]


def test_half_a_piece_is_dropped(draft_of):
    first = draft_of()
    first.add("one\n", {"lines": 1})
    first.close()
    part = first.file.with_name("file.part")
    with part.open("a") as stream:
        stream.write("two, but not who")  # killed here
    second = draft_of(about={"what": 2})
    assert second.notes == {"lines": 1}
    assert second.about == {"what": 1}  # of the process that began it
    second.add("two\n", {"lines": 2})
    second.finish()
    assert second.file.read_text() == "one\ntwo\n"


def test_a_new_draft_forgets_the_old_one(draft_of):
    first = draft_of()
    first.add("one\n", {"lines": 1})
    first.close()
    second = draft_of(anew=True, about={"what": 2})
    assert second.notes == {} and second.about == {"what": 2}
    second.add("other\n", {})
    second.finish()
    second.close()
    with pytest.raises(RunDirectoryError, match="file is there already"):
        draft_of()
    third = draft_of(anew=True)
    assert third.file.read_text() == "other\n"  # until the new one is whole


def test_two_processes_do_not_write_one_file(draft_of):
    draft_of()
    with pytest.raises(InUse, match="file.part is being written by another process"):
        draft_of()


@pytest.mark.parametrize("text", ["{", "[]", '{"bytes": 4}'])
def test_damaged_progress_is_named(draft_of, text):
    first = draft_of()
    first.add("one\n", {})
    first.close()
    first.file.with_name("file.progress").write_text(text)
    with pytest.raises(RunDirectoryError, match="file.progress is damaged"):
        draft_of()
    draft_of(anew=True)


def test_a_part_that_lost_lines_is_named(draft_of):
    first = draft_of()
    first.add("one\n", {})
    first.close()
    first.file.with_name("file.part").write_text("on")
    with pytest.raises(RunDirectoryError, match="shorter than file.progress says"):
        draft_of()
