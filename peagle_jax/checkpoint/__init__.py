"""Files and what is in them. Nothing here is imported by the core."""

import os

# transformers otherwise greets every command with the news that there is no PyTorch.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
