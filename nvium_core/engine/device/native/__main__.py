"""`python -m nvium_core.engine.device.native` compiles the libraries into the package, for images without a compiler.

On x86-64 it compiles for all instruction sets, elsewhere for this machine's own.
"""

from nvium_core.engine.device.native.instructions import X86_64, available
from nvium_core.engine.device.native.library import FOLDER, build

for instructions in available() if available()[-1] not in X86_64 else X86_64:
    build(instructions, FOLDER)
