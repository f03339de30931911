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


def closed(draft, notes):
    """The draft of another process, which has added a line."""
    draft.add("one\n", notes)
    draft.close()
    return draft


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
    first = closed(draft_of(), {"lines": 1})
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
    closed(draft_of(), {"lines": 1})
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


@pytest.mark.parametrize(
    "name, text, said",
    [
        ("file.progress", "{", "file.progress is damaged"),
        ("file.progress", "[]", "file.progress is damaged"),
        ("file.progress", '{"bytes": 4}', "file.progress is damaged"),
        ("file.part", "on", "shorter than file.progress says"),
    ],
)
def test_damage_is_named(draft_of, name, text, said):
    first = closed(draft_of(), {})
    first.file.with_name(name).write_text(text)
    with pytest.raises(RunDirectoryError, match=said):
        draft_of()
    draft_of(anew=True)
