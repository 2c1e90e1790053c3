"""``python -m jaxrec``: the command line where its script is not on the PATH."""

import sys

from jaxrec.commands import main

if __name__ == "__main__":
    sys.exit(main())
