"""`python -m attn_bounds.cli` is `attn-bounds`."""

import sys

from . import main

sys.exit(main())
