"""A dispatch is the same after its way to another process."""

import jax
import numpy as np

from peagle_jax.serve.wire import pack, unpack
from peagle_jax.speculative.programs import Dispatch
from peagle_jax.speculative.request import Request, settings_of
from peagle_jax.speculative.sampling import SamplingParams
from peagle_jax.speculative.state import Chunk, Copy, Turn


def test_steps_inputs_and_sizes_come_back():
    request = Request([1, 2], SamplingParams(temperature=0.5, seed=2**50, logit_bias=((3, -1.5),)), 9)
    tokens = np.arange(8, dtype=np.int32).reshape(2, 4)
    chunk = Chunk(
        *(tokens[:, 0], tokens[:, 1], tokens, tokens + 1, tokens[:, 2], np.array([True, False])),
        np.zeros((2, 9), np.uint32),
        settings_of(request, 40, 100_000),
    )
    flags = np.array([[True], [False]])
    turn = Turn(flags, ~flags, np.ones((2, 3), np.float32), np.zeros((2, 4, 2), np.float32))
    copy = Copy(tokens[0], tokens[1], tokens[0])
    for inputs in (chunk, turn, (turn, tokens, tokens.astype(np.uint32)), copy, tokens[0], None):
        sent = Dispatch("run_rounds", inputs, {"width": 2, "k": 3})
        data = pack(sent)
        found = unpack(data)
        assert (found.step, found.sizes) == (sent.step, sent.sizes)
        assert len(data) < 6000  # a request's counts of 100,000 tokens are zeros
        assert jax.tree.structure(found.inputs) == jax.tree.structure(inputs)
        for x, y in zip(jax.tree.leaves(found.inputs), jax.tree.leaves(inputs), strict=True):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(x, y)


def test_a_dispatch_without_inputs_is_its_name_and_sizes():
    sent = Dispatch("start_over", None, {"slots": 2, "positions": 9})
    assert unpack(pack(sent)) == sent
