"""`python -m flax_tf` is `flax-tf`."""

import sys

from flax_tf.cli import main

sys.exit(main())
