import os
import subprocess
import sys

import pytest

from peagle_jax import xla

PROGRAM = """
from peagle_jax.xla import tune_cpu
tune_cpu()
import jax, jax.numpy as jnp
x = jnp.ones((300, 300))
f = lambda x, y: jnp.sum(jnp.tanh(x @ y) * 2, axis=1)
text = jax.jit(f).lower(x, x).compile().as_text()
called = [line for line in text.splitlines() if "__ynn_fusion" in line]
assert not any("reduce" in line.split("metadata")[0] for line in called), called
assert "reduce-window" not in text, text
print(float(f(x, x)[0]))
"""


def test_the_installed_xla_takes_the_flags_fuses_no_reduction_into_a_library_call_and_splits_none():
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == 600.0


@pytest.mark.parametrize("flags", ["", "--xla_dump_to=x"])
def test_flags_of_the_user_stay(monkeypatch, flags):
    monkeypatch.setenv("XLA_FLAGS", flags)
    xla.tune_cpu()
    assert os.environ["XLA_FLAGS"].startswith(flags)
    assert xla.FUSIONS in os.environ["XLA_FLAGS"] and xla.WITHOUT in os.environ["XLA_FLAGS"]
    once = os.environ["XLA_FLAGS"]
    xla.tune_cpu()
    assert os.environ["XLA_FLAGS"] == once


@pytest.mark.parametrize("release", ["0.9.2", "0.13.0"])
def test_a_release_that_may_not_know_the_flag_never_sees_it(monkeypatch, release):
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(xla, "version", lambda _: release)
    xla.tune_cpu()
    assert xla.FUSIONS not in os.environ["XLA_FLAGS"]


@pytest.mark.parametrize("name", ["FUSIONS", "WITHOUT"])
def test_a_value_of_the_user_is_not_replaced(monkeypatch, name):
    flag = f"{getattr(xla, name)}=mine"
    monkeypatch.setenv("XLA_FLAGS", flag)
    xla.tune_cpu()
    assert os.environ["XLA_FLAGS"].count(getattr(xla, name)) == 1 and flag in os.environ["XLA_FLAGS"]
