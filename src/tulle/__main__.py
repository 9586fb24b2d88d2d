"""`python -m tulle`: the command line, where the `tulle` script is not on the path."""

import sys

from tulle.cli import main

sys.exit(main())
