"""What follows for replica groups from what those of a quorum tell one another."""

from dataclasses import replace

import pytest

from trainer.engine.federated.elastic.meeting import Meeting, Notice, refuse_difference

NEW = Notice(0, 4, None, is_new=True, is_patient=True, recipe="a", numbers={})
TRAINED = replace(NEW, report={"weight": 1.0}, is_new=False, is_patient=False)


def meet(*notices):
    return Meeting(tuple(replace(each, number=i) for i, each in enumerate(notices)))


def test_groups_that_start_wait_for_those_that_are_missing():
    assert meet(NEW, NEW).waits(3)
    assert not meet(NEW, NEW, NEW).waits(3)
    assert not meet(NEW, replace(NEW, is_patient=False)).waits(3)
    assert not meet(NEW, TRAINED).waits(3)


@pytest.mark.parametrize(
    ("notices", "source", "receivers", "reported"),
    [
        ((NEW, NEW, NEW), 0, (1, 2), []),
        ((NEW, replace(NEW, step=6), NEW), 1, (0, 2), []),
        # One that trains, and not a checkpoint of the same step.
        ((NEW, TRAINED, TRAINED), 1, (0,), [1, 2]),
        # A group that missed a round receives it, and what it has trained is dropped.
        ((TRAINED, replace(TRAINED, step=6)), 1, (0,), [1]),
        ((TRAINED, TRAINED), 0, (), [0, 1]),
    ],
)
def test_groups_that_need_the_state_receive_it_from_one_that_trains(
    notices, source, receivers, reported
):
    meeting = meet(*notices)
    assert meeting.source.number == source
    assert meeting.receivers == receivers
    assert [number for number, each in enumerate(meeting.reports) if each] == reported


def test_a_number_that_two_groups_have_is_found():
    told = [{**vars(NEW), "number": number} for number in (0, 1, 1)]
    assert Meeting.read(told).is_doubled
    assert not Meeting.read(told[:2]).is_doubled


def test_a_difference_names_the_keys():
    error = refuse_difference({"a": "1", "b": "1"}, {"a": "1", "b": "2", "c": "3"}, 0)
    assert "replica group 0 in b, c" in str(error)
