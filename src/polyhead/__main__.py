"""`python -m polyhead`: the command line."""

import sys

from polyhead.cli import main

sys.exit(main())
