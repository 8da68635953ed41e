"""`python -m tapereel.cli`, as `accelerate launch` and `torchrun` start it."""

import sys

from .command import main

sys.exit(main())
