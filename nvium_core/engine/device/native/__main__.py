"""`python -m nvium_core.engine.native` compiles for every kind of processor into the package, for machines without a
compiler: an image is built so."""

from nvium_core.engine.device.native.library import FOLDER, PROCESSORS, build

for processor in PROCESSORS:
    build(processor, FOLDER)
