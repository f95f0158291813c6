"""What else must hold on a mesh."""

import pytest

from tests.distributed import more_tasks as tasks

CHOICES = list(tasks.CHOICES)


@pytest.mark.parametrize("choice", CHOICES)
def test_dropout_is_that_of_one_process(fleet_of_2, choice):
    fleet_of_2.run(tasks.check_dropout, choice)


@pytest.mark.parametrize("choice", ["blocks", "heads"])
def test_sinks(fleet_of_2, choice):
    fleet_of_2.run(tasks.check_sinks, choice)


@pytest.mark.parametrize("choice", CHOICES)
def test_packed_sequences(fleet_of_2, choice):
    fleet_of_2.run(tasks.check_packed, choice)


def test_packed_sequences_with_a_mask_mod(fleet_of_2):
    fleet_of_2.run(tasks.check_packed_with_mask)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_model_with_two_masks_and_checkpointing(fleet_of_2, backend):
    fleet_of_2.run(tasks.check_model, backend)


@pytest.mark.parametrize("choice", ["groups", "stages"])
def test_one_graph_for_all_packings(fleet_of_2, choice):
    fleet_of_2.run(tasks.check_packings, choice)


@pytest.mark.parametrize("choice", ["blocks", "stages"])
def test_autocast_and_repeatability(fleet_of_2, choice):
    fleet_of_2.run(tasks.check_autocast_and_repeats, choice)


def test_captures_of_which_ranks_have_parts(fleet_of_2):
    fleet_of_2.run(tasks.check_captures)


@pytest.mark.parametrize("chunk", [8, 16])
def test_decode(fleet_of_4, chunk):
    fleet_of_4.run(tasks.check_decode, chunk)


def test_decode_from_pages(fleet_of_4):
    fleet_of_4.run(tasks.check_paged_decode)
