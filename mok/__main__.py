"""`python -m mok` is the `mok` command."""

from __future__ import annotations

import sys

from mok.cli import main

sys.exit(main())
