"""P-EAGLE speculative decoding for JAX."""

import signal
import sys

# Our own command begins. Until it runs (``arguments.run_command``), Ctrl-C in its imports just ends it.
if sys.argv[:1] == ["-m"] and "-m" in sys.orig_argv:
    _module = sys.orig_argv[sys.orig_argv.index("-m") + 1]
    if _module.split(".")[0] == __name__ and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
