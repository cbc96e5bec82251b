"""`python -m nvium_core.engine.device.native [TARGET]` compiles the libraries into the package, for images and wheels.

It compiles for all instruction sets of this machine's architecture, or with ziglang for those of a target such as
aarch64-linux-gnu.2.28.
"""

import sys

from nvium_core.engine.device.native.library import FOLDER, build
from nvium_core.engine.device.processor import X86_64, available

target = sys.argv[1] if len(sys.argv) > 1 else None
is_x86 = target.startswith("x86_64") if target else available()[-1] in X86_64
for instructions in X86_64 if is_x86 else ("neon",):
    build(instructions, FOLDER, target)
