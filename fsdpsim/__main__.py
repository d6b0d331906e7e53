"""``python -m fsdpsim``."""

import sys

from fsdpsim.cli import main

sys.exit(main())
