"""Without torch there is nothing to compare with, and the files here cannot even be imported."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]
