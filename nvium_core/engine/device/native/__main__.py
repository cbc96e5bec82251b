"""`python -m nvium_core.engine.device.native` compiles for all x86-64 instructions into the package, or for this
machine's own elsewhere, for machines without a compiler: an image is built so."""

from nvium_core.engine.device.native.instructions import X86_64, available
from nvium_core.engine.device.native.library import FOLDER, build

for instructions in available() if available()[-1] not in X86_64 else X86_64:
    build(instructions, FOLDER)
