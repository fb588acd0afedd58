"""``python -m peagle_jax``: says which commands there are."""

COMMANDS = """\
python -m peagle_jax.generate   decode one prompt, with and without a head
python -m peagle_jax.serve      serve a model over OpenAI's HTTP API
python -m peagle_jax.train      train a head: regenerate, show-mask, features, train

Each of them explains itself with --help.
"""

if __name__ == "__main__":
    print(COMMANDS, end="")
