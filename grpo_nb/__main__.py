"""`python -m grpo_nb` is `grpo-nb`."""

import sys

from grpo_nb.cli import main

if __name__ == "__main__":
    sys.exit(main())
