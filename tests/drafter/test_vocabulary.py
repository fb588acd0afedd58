import numpy as np
import pytest

from peagle_jax.drafter.vocabulary import (
    VocabularyError,
    check_mask_token,
    choose_draft_ids,
    choose_mask_token,
    coverage,
)

COUNTS = np.array([0, 5, 9, 0, 5, 1, 0, 2])


def test_the_most_frequent_ids_are_chosen_in_ascending_order():
    ids = choose_draft_ids(COUNTS, 3, ())
    assert ids.tolist() == [1, 2, 4] and ids.dtype == np.int32
    assert coverage(COUNTS, ids) == pytest.approx(19 / 22)


def test_required_ids_are_in_whatever_their_count():
    assert choose_draft_ids(COUNTS, 3, {6, 0}).tolist() == [0, 2, 6]


def test_ids_that_never_occur_fill_the_rest_from_below():
    assert choose_draft_ids(COUNTS, 7, {6}).tolist() == [0, 1, 2, 4, 5, 6, 7]
    sixty = np.zeros(1000, int)
    sixty[300:360] = 1
    ids = choose_draft_ids(sixty, 128, {999})
    assert len(ids) == 128 == len(set(ids.tolist())) and set(range(300, 360)) | {999} <= set(ids.tolist())


@pytest.mark.parametrize(
    ("size", "required", "message"),
    [
        (0, (), "1..8 tokens, found 0"),
        (-1, (), "found -1"),
        (9, (), "1..8 tokens, found 9"),
        (1, {1, 2}, "cannot hold the 2 required"),
        (4, {8}, r"lie in 0..7, found 8"),
    ],
)
def test_sizes_that_cannot_be_are_refused(size, required, message):
    with pytest.raises(VocabularyError, match=message):
        choose_draft_ids(COUNTS, size, required)


def test_the_mask_token_is_a_row_past_the_tokenizer_if_there_is_one():
    assert choose_mask_token(COUNTS, 6, special={0, 3}, reserved={0}) == 6
    assert choose_mask_token(COUNTS, 8, special={0, 3}, reserved={0}) == 3
    assert choose_mask_token(COUNTS, 8, special={0, 3, 7}, reserved=set()) == 3  # 7 occurs in the data


def test_no_free_id_for_the_mask_token_is_an_error():
    with pytest.raises(VocabularyError, match="set head.mask_token_id"):
        choose_mask_token(COUNTS, 8, special={0, 7}, reserved={0})


@pytest.mark.parametrize(
    ("token", "message"), [(3, "eos, bos or pad"), (5, "occurs 1 times"), (8, "outside the vocabulary of 8")]
)
def test_a_mask_token_with_a_meaning_is_refused(token, message):
    check_mask_token(6, COUNTS, {3})
    with pytest.raises(VocabularyError, match=message):
        check_mask_token(token, COUNTS, {3})
