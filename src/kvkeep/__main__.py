"""`python -m kvkeep`: the command line."""

import sys

from kvkeep.cli import main

sys.exit(main())
