"""`python -m polyhead`: the command line."""

import sys

from polyhead.cli.verbs import main

sys.exit(main())
