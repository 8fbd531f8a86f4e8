"""`python -m scheduler.cli`: the command, also where it is not installed."""

import sys

from scheduler.cli import main

sys.exit(main())
