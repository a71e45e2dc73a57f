"""Sites of one run with a WAN in between, under SYNC=diloco; nothing else loads torchft."""

import os

os.environ.setdefault(
    "RUST_LOG", "error"
)  # torchft's servers tell of every call; read when torchft is loaded
