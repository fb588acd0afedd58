"""What a run decides before it starts, on its own; whole runs are in test_loop."""

import numpy as np
import pytest

from peagle_jax.drafter.vocabulary import VocabularyError
from peagle_jax.train.setup import free_mask_token
from tests.train.tiny_run import END, SPARE, START, VOCAB, tokenizer


class Gapped:
    """Names ids 0..4 and 9: fewer names than its highest id."""

    all_special_ids, added_tokens_decoder, chat_template = (9,), {9: "<|end|>"}, ""
    eos_token_id, bos_token_id, pad_token_id = 9, None, None

    def get_vocab(self):
        return {**{f"w{i}": i for i in range(5)}, "<|end|>": 9}

    def __len__(self):
        return 6


def test_the_mask_token_is_a_row_past_every_name():
    assert free_mask_token(tokenizer(), np.zeros(VOCAB + 3)) == VOCAB
    assert free_mask_token(Gapped(), np.zeros(12)) == 10
    seen = np.zeros(12)
    seen[10] = 1
    assert free_mask_token(Gapped(), seen) == 11


def test_without_such_a_row_the_mask_token_is_a_special_token_without_a_meaning():
    assert free_mask_token(tokenizer(), np.zeros(VOCAB)) == SPARE
    assert SPARE not in (START, END)
    with pytest.raises(VocabularyError, match="no id of the target's vocabulary is free"):
        free_mask_token(tokenizer(), np.zeros(VOCAB), eos=[SPARE])
