"""`python -m agents.daemon`: the agent of one node."""

import sys

from agents.daemon.program import main

sys.exit(main())
